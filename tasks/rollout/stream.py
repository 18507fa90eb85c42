"""The stream of groups that is sampled ahead of the training: what finishes first is trained on first.

Policies and assignments go in as the training makes them, finished groups come out in the order in which they ended.
When a newer policy is there, no further group is begun with the older one. `rollout.weight_update` says what becomes of
those that are begun: they are sampled to their end, go on with the newer policy, or are dropped and sampled again.

A policy `v` is let in with the assignments of all steps up to `v + n`, n being `rollout.max_off_policy_steps`. A group
that was begun with it is due at step `v + n`, and a step leaves room for those that are due: it waits for them rather
than take a younger one in their place. So no group is older than `n` steps when it is trained on.

Where `rollout.stale` lets no step wait, a step takes what has ended, the oldest first. What is due at a step and was
not taken when that is filled is stale: it is stopped and recorded, and as many groups as lack are assigned in its
place.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from storage.schemas.stage_tables import ASSIGNMENTS
from tasks.arrays.columns import texts
from tasks.inference.sampling.load_meter import LoadMeter, MeasuredLoad
from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.rollout.stage import Put
from tasks.runtime.services import retry_lost
from tasks.runtime.stage import Policy, Ref
from tasks.stages import STREAM_ASSIGNMENT, STREAM_POLICY

Group = Mapping[str, pa.Table]
"""The rows of a finished group, by table."""
Read = Callable[[str, Ref], pa.Table]
"""Reads a table of a finished stage result."""
Served = TypeVar("Served")


SampleGroups = Callable[[Policy, pa.Table, Put, "SamplerSide"], None]
"""Samples assignments with a policy and puts each finished group; begins no further one once that is outdated."""


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose rollouts have ended."""

    group_id: str
    policy: Policy
    """The oldest one that sampled a part of it."""
    rows: Group
    load: MeasuredLoad | None = None
    """What was measured since the group before it was taken, of whichever step; None before it is taken."""


@dataclass(frozen=True)
class BegunGroup:
    """A group that is being sampled: the policy that began it, and when."""

    policy: Policy
    started_at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class StaleGroup:
    """A group that no step may take any more."""

    group_id: str
    assigned: pa.Table
    """The assignments of its members."""
    begun: BegunGroup | None
    """None where it had ended, or was not begun."""
    finished: FinishedGroup | None
    """None where it had not ended."""


class Stream:
    """The assignments of a run that are still to be sampled, and the finished groups that no step has taken yet.

    A thread samples from the first call of `take` on. Nothing is kept here that the ledger does not have, but for what
    is in flight: groups that steps have taken are known by their results, and all others are pending.
    """

    def __init__(self, read: Read, max_age: int, waits: bool = True, has_surplus: bool = False) -> None:
        """`waits` says whether a step waits for groups that are due (`rollout.stale`), and `has_surplus` whether more
        are assigned than steps take (`assignment.oversampling`), so that some may be left that nobody begins."""
        self._read = read
        self._max_age = max_age
        """Most steps from a policy to the step that trains on what it sampled."""
        self._waits = waits
        self._has_surplus = has_surplus
        self.meter = LoadMeter()
        self.versions: dict[str, int] = {}
        """The versions of all policies that may have sampled here, by key: a newer one is here before it is served."""
        self._changed = threading.Condition()
        self._unread: list[Ref] = []
        """Assignments that have not been read yet."""
        self._assigned: dict[str, Ref] = {}
        """Those that have, by what their groups' ids begin with: the step, and the batch of a further assignment."""
        self._open: dict[str, pa.Table] = {}
        """The rows of those of which a group may still be pending, in the order in which they came."""
        self._size = 0
        """Most groups of a step so far."""
        self._filling = 0, 0
        """The step that is being filled, or the next one, and how many groups it lacks."""
        self._policies: list[Policy] = []
        """Those that may have sampled what is not taken yet, the newest last."""
        self._results: list[Ref] = []
        """Results of steps whose groups have not been read yet."""
        self._taken: set[str] = set()
        """The groups of finished results."""
        self._given: set[str] = set()
        """The groups of the step that is being filled."""
        self._finished: list[FinishedGroup] = []
        self._begun: dict[str, BegunGroup] = {}
        """The groups that are being sampled."""
        self._stale: set[str] = set()
        """Those that no step may take any more, by the last step."""
        self._num_feeds = 0
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._closed = False

    def feed(self, assigned: Sequence[Ref], policy: Policy | None = None) -> None:
        """Let further assignments be sampled, from now on by `policy`, or else by the one that does already."""
        with self._changed:
            self._unread += assigned
            if policy:
                self._policies.append(policy)
                self.versions[policy.key] = policy.version
            self._num_feeds += 1
            self._changed.notify_all()

    def settle(self, result: Ref) -> None:
        """Take the rollouts of a step as they are recorded, whoever recorded them: its groups are sampled no more.

        What was given for the step and is not in it (another run was first) is sampled again.
        """
        with self._changed:
            self._results.append(result)
            self._given.clear()
            self._stale.clear()
            self._changed.notify_all()

    def take(
        self, step: int, size: int, done: Collection[str], sample: SampleGroups, stale: Collection[str] = ()
    ) -> Iterator[FinishedGroup]:
        """Yield the groups that a step of `size` groups lacks, as they end; `done` are those that it has already.

        `stale` are those that are recorded as stale with the step. Steps take one after the other. Raises what sampling
        raises.
        """
        with self._changed:
            self._given = {*done, *stale}
            self._size = max(self._size, size)
            self._filling = step, size - len(done)
            if self._thread is None:
                # Its logs belong to the flow run that began it, which is a context variable.
                work = (self._run, sample)
                self._thread = threading.Thread(target=copy_context().run, args=work, name="stream", daemon=True)
                self._thread.start()
        for _ in range(size - len(done)):
            yield self._next()

    def expire(self, step: int) -> list[StaleGroup]:
        """Give up the groups that no step may take once `step` has its own, in order of their ids; return them."""
        if self._waits:
            return []
        last = step - self._max_age
        with self._changed:
            finished = {each.group_id: each for each in self._finished if each.policy.version <= last}
            begun = {name: each for name, each in self._begun.items() if each.policy.version <= last}
            # Of more groups than steps take some would wait for ever: those that are assigned later are begun instead.
            pending = _groups(self._pending()) if self._has_surplus else set()
            names = finished.keys() | begun.keys() | {name for name in pending if step_of(name) <= last}
            self._finished = [each for each in self._finished if each.group_id not in finished]
            self._begun = {name: each for name, each in self._begun.items() if name not in begun}
            self._given |= names
            self._stale |= names
            return [
                StaleGroup(name, self._rows_of(name), begun.get(name), finished.get(name)) for name in sorted(names)
            ]

    def find_expired(self, groups: Collection[str]) -> Collection[str]:
        """Return those of some groups that are not to be sampled any further: stale ones, all once it is closed."""
        with self._changed:
            self._placed_groups()
            return groups if self._closed else self._stale.intersection(groups)

    def close(self) -> None:
        """Begin nothing any more, and stop what is in flight: no step takes it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def origins(self, groups: Collection[str], oldest: int) -> dict[str, str]:
        """Return the keys of what some groups were made from beside the step's own: assignments, and all policies from
        version `oldest` on."""
        with self._changed:
            self._read_assigned()
            names = sorted({_assignment_of(group) for group in groups})
            policies = {f"{STREAM_POLICY}{each.version}": each.key for each in self._policies if each.version >= oldest}
            return {f"{STREAM_ASSIGNMENT}{name}": self._assigned[name].key for name in names} | policies

    def _next(self) -> FinishedGroup:
        def find() -> FinishedGroup | None:
            if self._waits:
                return next(filter(self._fits, self._finished), None)
            return next(iter(sorted(self._finished, key=lambda group: group.policy.version)), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or self._failure or self._closed)
            # What has ended is taken first: it is lost if it is not committed.
            if not (group := find()):
                assert self._failure, "the stream was closed while a step waits for its groups"
                raise self._failure
            self._finished.remove(group)
            self._given.add(group.group_id)
            step, left = self._filling
            self._filling = (step, left - 1) if left > 1 else (step + 1, self._size)
            return replace(group, load=self.meter.read())

    def _fits(self, group: FinishedGroup) -> bool:
        """Tell whether all that is due earlier still finds room if the step that is being filled takes this one."""
        step, _ = self._filling
        return self._has_room(range(step, group.policy.version + self._max_age))

    def _oldest_with_room(self, versions: Collection[int]) -> Policy | None:
        """Return the oldest policy of some versions with which one more group may be begun, or None."""
        step, _ = self._filling
        for policy in sorted(self._policies, key=lambda each: each.version):
            due = policy.version + self._max_age
            if policy.version in versions and due >= step and (not self._waits or self._has_room(count(due))):
                return policy
        return None

    def _has_room(self, steps: Iterable[int]) -> bool:
        """Tell whether one more group finds room, beside all that are due by then, at some steps, which rise.

        Steps are filled one after the other: this is the earliest-deadline rule for slots of equal length.
        """
        step, left = self._filling
        policies = [each.policy for each in self._begun.values()] + [each.policy for each in self._finished]
        dues = sorted(each.version + self._max_age for each in policies)
        for at in steps:
            if bisect_right(dues, at) >= left + (at - step) * self._size:
                return False
            if not dues or at >= dues[-1]:  # no more are due later, and there is only more room
                break
        return True

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
            pending, side = self._pending(), SamplerSide(self)
        try:
            if pending.num_rows:
                sample(side.policy, pending, lambda rows: self._put(side.policy, rows), side)
        finally:
            with self._changed:
                self._begun.clear()  # what was begun and has not ended was dropped, or lost with a service

    def _put(self, policy: Policy, rows: Group) -> None:
        with self._changed:
            (group_id,) = set(texts(rows["traces"]["group_id"]))
            self._begun.pop(group_id, None)
            # Another run of the same key may have recorded the group for a step meanwhile.
            if group_id not in self._placed_groups():
                self._finished.append(FinishedGroup(group_id, _oldest(rows["traces"], policy), rows))
            self._changed.notify_all()

    def _pending(self) -> pa.Table:
        """Return the assignments of groups that are neither taken nor finished, in order of their steps."""
        known = self._placed_groups() | {each.group_id for each in self._finished} | self._begun.keys()
        self._read_assigned()
        # A long run asks after each step: assignments of which all groups are taken are looked at no more.
        self._open = {name: rows for name, rows in self._open.items() if not self._taken.issuperset(_groups(rows))}
        whole = pa.concat_tables([ASSIGNMENTS.arrow.empty_table(), *self._open.values()])
        return whole.filter(pc.invert(pc.is_in(whole["group_id"], value_set=pa.array(sorted(known), pa.string()))))

    def _rows_of(self, group_id: str) -> pa.Table:
        self._read_assigned()
        rows = self._open[_assignment_of(group_id)]
        return rows.filter(pc.field("group_id") == group_id)

    def _read_assigned(self) -> None:
        unread, self._unread = self._unread, []
        for ref in unread:
            rows = self._read("assignments", ref)
            (name,) = {_assignment_of(group) for group in _groups(rows)}
            self._assigned[name], self._open[name] = ref, rows

    def _placed_groups(self) -> set[str]:
        results, self._results = self._results, []
        for result in results:
            self._taken.update(texts(self._read("intakes", result)["group_id"]))
            if "stale_groups" in dict(result.rows):
                recorded = texts(self._read("stale_groups", result)["group_id"])
                self._stale.update(recorded)
                self._taken.update(recorded)
        return self._taken | self._given


class SamplerSide:
    """The sampler's side of the stream, from the policy that it begins with on."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.policy = stream._policies[-1]
        self._feeds = stream._num_feeds

    def is_outdated(self) -> bool:
        """Tell whether no further group may be begun: a newer policy is there, or the stream is closed."""
        return self._stream._closed or self._stream._num_feeds != self._feeds

    def begin(self, group_id: str, versions: Collection[int] = ()) -> int:
        """Note that a group is begun, before anything of it is sampled; return the version of its oldest policy.

        That is the present policy, or the oldest one among `versions`, which have sampled some of its turns before,
        with which the group still finds room in a step.
        """
        stream = self._stream
        with stream._changed:
            policy = stream._oldest_with_room(versions) or self.policy
            if group_id not in stream._stale:  # it is stopped in a moment
                stream._begun[group_id] = BegunGroup(policy)
            return policy.version

    def renew(self, exchange: Callable[[Policy], Served | None]) -> tuple[Served, pa.Table] | None:
        """Go on with the newest policy: return what `exchange` made of it, and the assignments that may be begun.

        None where that returns None, or the stream is closed.
        """
        stream = self._stream
        with stream._changed:
            policy, feeds = stream._policies[-1], stream._num_feeds
        served = None if stream._closed else exchange(policy)
        if served is None:
            return None
        with stream._changed:
            self.policy, self._feeds = policy, feeds
            return served, stream._pending()


def _oldest(traces: pa.Table, policy: Policy) -> Policy:
    """Return the oldest policy that sampled some traces, `policy` where only frozen models did."""
    rows = traces.select(["policy_key", "policy_version"]).to_pylist()
    found = (Policy(row["policy_key"], row["policy_version"]) for row in rows if row["policy_key"])
    return min(found, key=lambda each: each.version, default=policy)


def _groups(assigned: pa.Table) -> set[str]:
    return set(texts(assigned["group_id"]))


def _assignment_of(group_id: str) -> str:
    """Return what the ids of all groups of an assignment begin with: STEP-SLOT, or STEP.BATCH-SLOT of a further one."""
    return group_id.partition("-")[0]


def step_of(group_id: str) -> int:
    """Return the step whose assignment named a group, by the id that the assignment stage gave it."""
    return int(_assignment_of(group_id).partition(".")[0])
