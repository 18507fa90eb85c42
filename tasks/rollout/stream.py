"""The stream of groups that is sampled ahead of the training: what finishes first is trained on first.

Policies and assignments go in as the training makes them, finished groups come out in the order in which they ended. At
a time one policy samples. When a newer one is there, no further group is begun with the older one, and those that are
begun are sampled to their end. A policy `v` is let in with the assignments of all steps up to `v + n`, so that no group
is older than `n` steps when it is trained on, n being `rollout.max_off_policy_steps`.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from storage.schemas.stage_tables import ASSIGNMENTS
from tasks.arrays.columns import texts
from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.rollout.stage import Put
from tasks.runtime.services import retry_lost
from tasks.runtime.stage import Policy, Ref
from tasks.stages import STREAM_ASSIGNMENT, STREAM_POLICY

Group = Mapping[str, pa.Table]
"""The rows of a finished group, by table."""
Read = Callable[[str, Ref], pa.Table]
"""Reads a table of a finished stage result."""


SampleGroups = Callable[[Policy, pa.Table, Put, Callable[[], bool]], None]
"""Samples assignments with a policy and puts each finished group; begins no further one once it is told outdated."""


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose rollouts have ended."""

    group_id: str
    policy: Policy
    rows: Group


class Stream:
    """The assignments of a run that are still to be sampled, and the finished groups that no step has taken yet.

    A thread samples from the first call of `take` on. Nothing is kept here that the ledger does not have, but for what
    is in flight: groups that steps have taken are known by their results, and all others are pending.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._changed = threading.Condition()
        self._assigned: list[Ref] = []
        """The assignments of each step, from step 0 on."""
        self._open: dict[int, pa.Table] = {}
        """By step, the rows of assignments of which a group may still be pending."""
        self._num_read = 0
        """How many steps' assignments have been read."""
        self._policies: list[Policy] = []
        """Those that may have sampled what is not taken yet, the newest last."""
        self._results: list[Ref] = []
        """Results of steps whose groups have not been read yet."""
        self._taken: set[str] = set()
        """The groups of finished results."""
        self._given: set[str] = set()
        """The groups of the step that is being filled."""
        self._finished: deque[FinishedGroup] = deque()
        self._num_feeds = 0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._closed = False

    def feed(self, assigned: Sequence[Ref], policy: Policy) -> None:
        """Let a policy sample from now on, and further assignments be sampled: those of the steps that follow."""
        with self._changed:
            self._assigned += assigned
            self._policies.append(policy)
            self._num_feeds += 1
            self._changed.notify_all()

    def settle(self, result: Ref) -> None:
        """Take the rollouts of a step as they are recorded, whoever recorded them: its groups are sampled no more.

        What was given for the step and is not in it (another run was first) is sampled again.
        """
        with self._changed:
            self._results.append(result)
            self._given.clear()
            self._changed.notify_all()

    def take(self, count: int, done: Collection[str], sample: SampleGroups) -> Iterator[FinishedGroup]:
        """Yield the next `count` groups for a step, as they end; `done` are those that it has already.

        Steps take one after the other. Raises what sampling raises.
        """
        with self._changed:
            self._given = set(done)
            if self._thread is None:
                # Its logs belong to the flow run that began it, which is a context variable.
                work = (self._run, sample)
                self._thread = threading.Thread(target=copy_context().run, args=work, name="stream", daemon=True)
                self._thread.start()
        for _ in range(count):
            yield self._next()

    def close(self) -> None:
        """Begin nothing any more; the thread ends when what is in flight has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def origins(self, groups: Collection[str], oldest: int) -> dict[str, str]:
        """Return the keys of what some groups were made from beside the step's own: assignments, and all policies from
        version `oldest` on."""
        with self._changed:
            steps = sorted({step_of(group) for group in groups})
            policies = {f"{STREAM_POLICY}{each.version}": each.key for each in self._policies if each.version >= oldest}
            return {f"{STREAM_ASSIGNMENT}{step}": self._assigned[step].key for step in steps} | policies

    def _next(self) -> FinishedGroup:
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._failure or self._closed)
            # What has ended is taken first: it is lost if it is not committed.
            if self._failure and not self._finished:
                raise self._failure
            assert self._finished, "the stream was closed while a step waits for its groups"
            group = self._finished.popleft()
            self._given.add(group.group_id)
            return group

    def _run(self, sample: SampleGroups) -> None:
        try:
            while self._wait_for_work():
                retry_lost(lambda: self._sample(sample), ServiceLost)
        except BaseException as failure:  # handed to whoever waits for a group
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._pending().num_rows)
            return not self._closed

    def _sample(self, sample: SampleGroups) -> None:
        """Sample what is pending with the newest policy, until that is no longer the newest."""
        with self._changed:
            pending, policy, feeds = self._pending(), self._policies[-1], self._num_feeds
        if pending.num_rows:
            put = lambda rows: self._put(policy, rows)  # noqa: E731
            sample(policy, pending, put, lambda: self._closed or self._num_feeds != feeds)

    def _put(self, policy: Policy, rows: Group) -> None:
        with self._changed:
            (group_id,) = set(texts(rows["traces"]["group_id"]))
            # Another run of the same key may have recorded the group for a step meanwhile.
            if group_id not in self._placed_groups():
                self._finished.append(FinishedGroup(group_id, policy, rows))
                self._changed.notify_all()

    def _pending(self) -> pa.Table:
        """Return the assignments of groups that are neither taken nor finished, in order of their steps."""
        known = self._placed_groups() | {each.group_id for each in self._finished}
        while self._num_read < len(self._assigned):
            self._open[self._num_read] = self._read("assignments", self._assigned[self._num_read])
            self._num_read += 1
        # A long run asks after each step: steps of which all groups are taken are looked at no more.
        self._open = {step: rows for step, rows in self._open.items() if not self._taken.issuperset(_groups(rows))}
        whole = pa.concat_tables([ASSIGNMENTS.arrow.empty_table(), *self._open.values()])
        return whole.filter(pc.invert(pc.is_in(whole["group_id"], value_set=pa.array(sorted(known), pa.string()))))

    def _placed_groups(self) -> set[str]:
        results, self._results = self._results, []
        for result in results:
            self._taken.update(texts(self._read("intakes", result)["group_id"]))
        return self._taken | self._given


def _groups(assigned: pa.Table) -> set[str]:
    return set(texts(assigned["group_id"]))


def step_of(group_id: str) -> int:
    """Return the step whose assignment named a group, by the id that the assignment stage gave it: STEP-SLOT."""
    return int(group_id.partition("-")[0])
