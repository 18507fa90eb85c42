"""RolloutQueue: groups that are sampled ahead of the training, of which each step takes those that end first.

A group is pending once its assignment is added, in flight once it is begun, then finished, and last taken by a step or
stale. Policies and assignments are added as the training makes them. When a newer policy is added, no further group is
begun with the older one; `rollout.weight_update` says whether groups in flight are sampled to their end, continue with
the newer policy, or are dropped and sampled again.

A policy `v` is added with the assignments of all steps up to `v + n`, n being `rollout.max_off_policy_steps`. A group
that was begun with it is due at step `v + n`, and a step leaves room for groups that are due: it waits for them rather
than take a younger one in their place. So no group is older than `n` steps when it is trained on. Where `rollout.stale`
lets no step wait, a step takes finished groups, the oldest first. A group that is due at a step and was not taken when
that is filled is stale: it is stopped and recorded, and as many groups as are missing are assigned in its place.

Callers: the thread that builds a batch (`pop`, `drop_stale`, `mark_recorded`), the training loop (`add`, `close`), and
the queue's thread with the sampler's event loop, which samples from the first `pop` on (`policy`, `is_outdated`,
`begin`, `put`, `renew`, `find_dropped`). Nothing is kept here that the ledger does not have, but groups in flight and
finished: groups that steps have taken are known by their results, and all others are pending.
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
from tasks.arrays.columns import rows_without, texts
from tasks.inference.sampling.load_meter import LoadMeter
from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.inference.trace_rows.rows import by_policy
from tasks.runtime.stage import Policy, Ref, retry_lost
from tasks.stages import STREAM_ASSIGNMENT, STREAM_POLICY

GroupTables = Mapping[str, pa.Table]
"""The rows of a finished group, by table."""
Served = TypeVar("Served")


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose rollouts have ended."""

    group_id: str
    policy: Policy
    """The oldest one that sampled a part of it."""
    rows: GroupTables
    load: Mapping[str, float] | None = None
    """Load, by columns of intake_loads, since the group before it was taken; None before it is taken."""


@dataclass(frozen=True)
class BegunGroup:
    """A group in flight: the policy that began it, and when, in seconds since the epoch."""

    policy: Policy
    started_at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class StaleGroup:
    """A group that no step may take any longer."""

    group_id: str
    assigned: pa.Table
    """The assignments of its members."""
    begun: BegunGroup | None
    """None where it had ended, or was not begun."""
    finished: FinishedGroup | None
    """None where it had not ended."""


class RolloutQueue:
    """The groups of a run that are still to be sampled, in flight, or finished and taken by no step."""

    def __init__(
        self, read: Callable[[str, Ref], pa.Table], max_lag: int, waits: bool = True, has_surplus: bool = False
    ) -> None:
        """`read` reads a table of a finished result; `max_lag` bounds the steps from a policy to the step that trains.

        `waits`: whether a step waits for groups that are due (`rollout.stale`). `has_surplus`: whether more groups are
        assigned than steps take (`assignment.oversampling`), so that some may never be begun.
        """
        self._read, self._max_lag, self._waits, self._has_surplus = read, max_lag, waits, has_surplus
        self.meter = LoadMeter()
        self.versions: dict[str, int] = {}
        """Versions, by key, of all policies that may have sampled here; a policy is added before it is served."""
        self.policy = Policy("", 0)
        """The policy that samples."""
        self._changed = threading.Condition()
        self._unread: list[Ref] = []
        """Assignments that have not been read yet."""
        self._assigned: dict[str, Ref] = {}
        """Assignments that were read, by the beginning of their groups' ids: the step, and the further batch."""
        self._open: dict[str, pa.Table] = {}
        """Rows of the assignments of which a group may still be pending, in the order in which they were added."""
        self._size = 0
        """Most groups of a step so far."""
        self._filling = 0, 0
        """The step that is being filled, or the next one, and how many groups it lacks."""
        self._policies: list[Policy] = []
        """Policies that may have sampled groups that are not taken yet, the newest last."""
        self._results: list[Ref] = []
        """Results of steps whose groups have not been read yet."""
        self._taken: set[str] = set()
        """The groups of recorded results."""
        self._popped: set[str] = set()
        """The groups of the step that is being filled."""
        self._finished: list[FinishedGroup] = []
        self._begun: dict[str, BegunGroup] = {}
        self._stale: set[str] = set()
        """The groups that no step may take any longer, by the last step."""
        self._num_additions = self._seen_additions = 0
        """Calls of `add`, and those that the sampler knows."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._closed = False

    def add(self, assigned: Sequence[Ref], policy: Policy | None = None) -> None:
        """Let further assignments be sampled, by a new `policy` from now on, or else by the newest one."""
        with self._changed:
            self._unread += assigned
            if policy:
                self._policies.append(policy)
                self.versions[policy.key] = policy.version
            self._num_additions += 1
            self._changed.notify_all()

    def mark_recorded(self, result: Ref) -> None:
        """Take the rollouts of a step as they are recorded, by whichever process: its groups are sampled no more.

        Groups that were popped for the step and are not in it (another run was first) are sampled again.
        """
        with self._changed:
            self._results.append(result)
            self._popped.clear()
            self._stale.clear()
            self._changed.notify_all()

    def pop(
        self,
        step: int,
        size: int,
        done: Collection[str],
        sample: Callable[[pa.Table], None],
        stale: Collection[str] = (),
    ) -> Iterator[FinishedGroup]:
        """Yield the groups that a step of `size` groups lacks, as they end; `done` are the groups that it has already.

        `stale` are the groups that are recorded as stale with the step. `sample` samples assignments with `policy`,
        puts each finished group and begins no further one once it is outdated; it is used by the queue's thread from
        the first call on. Steps pop sequentially. Raises what sampling raises.
        """
        with self._changed:
            self._popped = {*done, *stale}
            self._size = max(self._size, size)
            self._filling = step, size - len(done)
            if self._thread is None:
                # Its logs belong to the flow run that began it, which is a context variable.
                work = (self._run, sample)
                self._thread = threading.Thread(target=copy_context().run, args=work, name="rollouts", daemon=True)
                self._thread.start()
        for _ in range(size - len(done)):
            yield self._next()

    def drop_stale(self, step: int) -> list[StaleGroup]:
        """Drop the groups that no step may take once `step` has its groups, in order of their ids; return them."""
        if self._waits:
            return []
        last = step - self._max_lag
        with self._changed:
            finished = {group.group_id: group for group in self._finished if group.policy.version <= last}
            begun = {name: group for name, group in self._begun.items() if group.policy.version <= last}
            # With a surplus some groups would wait permanently: those that are assigned later are begun instead.
            pending = _groups(self._pending()) if self._has_surplus else set()
            names = finished.keys() | begun.keys() | {name for name in pending if step_of(name) <= last}
            self._finished = [group for group in self._finished if group.group_id not in finished]
            self._begun = {name: group for name, group in self._begun.items() if name not in begun}
            self._popped |= names
            self._stale |= names
            return [
                StaleGroup(name, self._rows_of(name), begun.get(name), finished.get(name)) for name in sorted(names)
            ]

    def find_dropped(self, groups: Collection[str]) -> Collection[str]:
        """Return which groups are not to be sampled any further: stale ones, and all once the queue is closed."""
        with self._changed:
            self._placed_groups()
            return groups if self._closed else self._stale.intersection(groups)

    def close(self) -> None:
        """Begin no further group, and stop those in flight: no step takes them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def origins(self, groups: Collection[str], oldest: int) -> dict[str, str]:
        """Return the keys of the inputs of some groups beside the step's own: assignments, and all policies from
        version `oldest` on."""
        with self._changed:
            self._read_assigned()
            names = sorted({_assignment_of(group) for group in groups})
            policies = {f"{STREAM_POLICY}{each.version}": each.key for each in self._policies if each.version >= oldest}
            return {f"{STREAM_ASSIGNMENT}{name}": self._assigned[name].key for name in names} | policies

    def is_outdated(self) -> bool:
        """Return whether the sampler begins no further group: a newer policy was added, or the queue is closed."""
        return self._closed or self._num_additions != self._seen_additions

    def begin(self, group_id: str, versions: Collection[int] = ()) -> int:
        """Mark a group as begun, before anything of it is sampled; return the version of its oldest policy.

        That is the present policy, or the oldest one among `versions`, which have sampled some of its turns before,
        with which the group still finds room in a step.
        """
        with self._changed:
            policy = self._oldest_with_room(versions) or self.policy
            if group_id not in self._stale:  # it is stopped in a moment
                self._begun[group_id] = BegunGroup(policy)
            return policy.version

    def put(self, rows: GroupTables) -> None:
        """Take the rows of a finished group."""
        with self._changed:
            (group_id,) = set(texts(rows["traces"]["group_id"]))
            self._begun.pop(group_id, None)
            # Another run of the same key may have recorded the group for a step meanwhile.
            if group_id not in self._placed_groups():
                self._finished.append(FinishedGroup(group_id, _oldest(rows["traces"], self.policy), rows))
            self._changed.notify_all()

    def renew(self, exchange: Callable[[Policy], Served | None]) -> tuple[Served, pa.Table] | None:
        """Continue with the newest policy: return the result of `exchange`, and the assignments that may be begun.

        None where `exchange` returns None, or the queue is closed.
        """
        with self._changed:
            policy, additions = self._policies[-1], self._num_additions
        served = None if self._closed else exchange(policy)
        if served is None:
            return None
        with self._changed:
            self.policy, self._seen_additions = policy, additions
            return served, self._pending()

    def _next(self) -> FinishedGroup:
        def find() -> FinishedGroup | None:
            if self._waits:
                return next(filter(self._fits, self._finished), None)
            return min(self._finished, key=lambda group: group.policy.version, default=None)

        with self._changed:
            self._changed.wait_for(lambda: find() or self._failure or self._closed)
            # Finished groups first: they are lost if they are not committed.
            if not (group := find()):
                assert self._failure, "the queue was closed while a step waits for its groups"
                raise self._failure
            self._finished.remove(group)
            self._popped.add(group.group_id)
            step, left = self._filling
            self._filling = (step, left - 1) if left > 1 else (step + 1, self._size)
            return replace(group, load=self.meter.read())

    def _fits(self, group: FinishedGroup) -> bool:
        """Return whether all groups that are due earlier find room if the step that is being filled takes this one."""
        step, _ = self._filling
        return self._has_room(range(step, group.policy.version + self._max_lag))

    def _oldest_with_room(self, versions: Collection[int]) -> Policy | None:
        """Return the oldest policy of some versions with which one more group may be begun, or None."""
        step, _ = self._filling
        for policy in sorted(self._policies, key=lambda each: each.version):
            due = policy.version + self._max_lag
            if policy.version in versions and due >= step and (not self._waits or self._has_room(count(due))):
                return policy
        return None

    def _has_room(self, steps: Iterable[int]) -> bool:
        """Return whether one more group finds room, beside all that are due by then, at some steps, which rise.

        Steps are filled sequentially: this is the earliest-deadline rule for slots of equal length.
        """
        step, left = self._filling
        policies = [group.policy for group in self._begun.values()] + [group.policy for group in self._finished]
        due = sorted(policy.version + self._max_lag for policy in policies)
        for at in steps:
            if bisect_right(due, at) >= left + (at - step) * self._size:
                return False
            if not due or at >= due[-1]:  # no more are due later, and there is only more room
                break
        return True

    def _run(self, sample: Callable[[pa.Table], None]) -> None:
        try:
            while self._wait_for_pending():
                retry_lost(lambda: self._sample(sample), ServiceLost)
        except BaseException as failure:  # raised by the thread that waits for a group
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _wait_for_pending(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._pending().num_rows)
            return not self._closed

    def _sample(self, sample: Callable[[pa.Table], None]) -> None:
        """Sample pending groups with the newest policy, until that is no longer the newest."""
        with self._changed:
            pending = self._pending()
            self.policy, self._seen_additions = self._policies[-1], self._num_additions
        try:
            if pending.num_rows:
                sample(pending)
        finally:
            with self._changed:
                self._begun.clear()  # groups that were begun and have not ended were dropped, or lost with a service

    def _pending(self) -> pa.Table:
        """Return the assignments of groups that are neither taken nor finished, in order of their steps."""
        known = self._placed_groups() | {group.group_id for group in self._finished} | self._begun.keys()
        self._read_assigned()
        # A long run looks after each step: assignments of which all groups are taken are read no more.
        self._open = {name: rows for name, rows in self._open.items() if not self._taken.issuperset(_groups(rows))}
        table = pa.concat_tables([ASSIGNMENTS.arrow.empty_table(), *self._open.values()])
        return rows_without(table, "group_id", known)

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
            self._taken |= _groups(self._read("intakes", result))
            if "stale_groups" in dict(result.rows):
                stale = _groups(self._read("stale_groups", result))
                self._stale |= stale
                self._taken |= stale
        return self._taken | self._popped


def _oldest(traces: pa.Table, policy: Policy) -> Policy:
    """Return the oldest policy that sampled some traces, `policy` where only frozen models did."""
    rows = traces.filter(by_policy(traces)).select(["policy_key", "policy_version"]).to_pylist()
    policies = (Policy(row["policy_key"], row["policy_version"]) for row in rows)
    return min(policies, key=lambda each: each.version, default=policy)


def _groups(rows: pa.Table) -> set[str]:
    return set(texts(rows["group_id"]))


def _assignment_of(group_id: str) -> str:
    """Return the beginning of the ids of an assignment's groups: STEP-SLOT, or STEP.BATCH-SLOT of a further one."""
    return group_id.partition("-")[0]


def step_of(group_id: str) -> int:
    """Return the step whose assignment named a group, by the id that the assignment stage gave it."""
    return int(_assignment_of(group_id).partition(".")[0])
