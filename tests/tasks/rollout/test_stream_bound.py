"""Whatever begins and ends when: each step finds its groups, each group its step, and none is older than the bound."""

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.schemas.stage_tables import ASSIGNMENTS
from tasks.rollout.queue import RolloutQueue
from tasks.runtime.stage import Policy, Ref


class Simulated:
    """A queue without an engine: groups begin and end in any order, and the newest policy begins them."""

    def __init__(self, steps, size, bound, chance, surplus=0, waits=True):
        self.steps, self.size, self.bound, self.chance = steps, size, bound, chance
        self.surplus = surplus
        """Groups that each step assigns beyond what it takes."""
        self.queue = RolloutQueue(self.read, bound, waits, surplus > 0)
        self.assigned = {}
        """The groups of each assignment."""
        self.stale = []
        """Groups that were given up, with their ages; None of those that were not begun."""
        self.queue._size = size  # as the first step that takes its groups says
        self.pending = []
        self.running = {}
        self.taken = []
        """Groups with their ages."""
        self.share_kept = chance.choice([0.0, 0.3])
        """Of older policies, those that have sampled turns of a group that is begun."""

    def read(self, table, ref):
        shared = {"assignment_id": "", "member": 0, "environment": "", "example_id": "", "seed": 0}
        return pa.Table.from_pylist(
            [{"group_id": name, **shared} for name in self.assigned[ref.key]], ASSIGNMENTS.arrow
        )

    def assign(self, name, count):
        """Assign so many groups, which wait for somebody to begin them."""
        self.assigned[name] = [f"{name}-{slot}" for slot in range(count)]
        self.pending += self.assigned[name]
        return Ref("assignment", 0, name, (), 0, 0.0, True)

    def run(self):
        """Fill all steps, one after the other; a policy is there as soon as its step is filled."""
        fed = spare = 0
        for step in range(self.steps):
            new = range(fed, min(step + self.bound + 1, self.steps))
            if new:
                assigned = [self.assign(str(each), self.size + self.surplus) for each in new]
                self.queue.add(assigned, Policy(str(step), step))
                fed = new.stop
            self.queue._filling = step, self.size
            for _ in range(self.size):
                self.take(step)
            stale = self.expire(step)
            spare += self.surplus - stale
            if spare < 0:
                self.queue.add([self.assign(f"{step}.1", -spare)])
                spare = 0

    def expire(self, step):
        """Stop what is too old for any further step; return how many groups that were."""
        found = self.queue.drop_stale(step)
        for group in found:
            by = group.begun.policy if group.begun else group.finished.policy if group.finished else None
            self.stale.append((group.group_id, step - by.version if by else None))
            self.running.pop(group.group_id, None)
            self.pending = [name for name in self.pending if name != group.group_id]
            assert group.assigned["group_id"].to_pylist() == [group.group_id]
        return len(found)

    def take(self, step):
        # Where no step waits, more groups may have ended than the step takes.
        while not self.queue._waits and (self.pending or self.running) and self.chance.random() < 0.3:
            self.go_on()
        fits = lambda group: not self.queue._waits or self.queue._fits(group)  # noqa: E731
        while not any(map(fits, self.queue._finished)):
            self.go_on()
        group = self.queue._next()
        self.taken.append((group.group_id, step - group.policy.version))

    def go_on(self):
        """Begin a group or end one, whichever comes first."""
        assert self.pending or self.running, "a step waits, and nothing is under way"
        if self.pending and (not self.running or self.chance.random() < 0.5):
            self.queue.policy = self.queue._policies[-1]
            name = self.pending.pop(self.chance.randrange(len(self.pending)) if self.chance.random() < 0.3 else 0)
            self.running[name] = self.begin(name)
            return
        # Long groups come late: the first ones are the least likely to end.
        name = list(self.running)[-1 - int(len(self.running) * self.chance.random() ** 3)]
        policy = self.running.pop(name)
        rows = {"group_id": [name], "policy_key": [policy.key], "policy_version": [policy.version], "info": [""]}
        self.queue.put({"traces": pa.table(rows)})

    def begin(self, name):
        """Begin a group with the turn's policy, or the oldest that it may have of those with kept turns of it."""
        kept = {each.version for each in self.queue._policies if self.chance.random() < self.share_kept}
        version = self.queue.begin(name, kept)
        assert version in kept | {self.queue.policy.version}
        return next(each for each in self.queue._policies if each.version == version)


@settings(max_examples=150)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(2, 4), st.randoms(use_true_random=False))
def test_no_group_is_older_than_the_bound_and_none_is_left(steps, size, bound, chance):
    found = Simulated(steps, size, bound, chance)
    found.run()
    assert sorted(name for name, _ in found.taken) == sorted(f"{s}-{k}" for s in range(steps) for k in range(size))
    assert all(0 <= age <= bound for _, age in found.taken)
    assert not found.queue._begun and not found.queue._finished


@settings(max_examples=150)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(2, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_where_no_step_waits_what_is_too_old_is_given_up_and_no_step_lacks_groups(steps, size, bound, surplus, chance):
    found = Simulated(steps, size, bound, chance, surplus, waits=False)
    found.run()
    names = [name for name, _ in (*found.taken, *found.stale)]
    assert len(found.taken) == steps * size and len(names) == len(set(names))
    left = {*found.pending, *found.running, *(each.group_id for each in found.queue._finished)}
    assert left.isdisjoint(names) and left | set(names) == {name for group in found.assigned.values() for name in group}
    assert all(0 <= age <= bound for _, age in found.taken)
    # A group is given up once the last step that might have taken it is filled, and not before.
    assert {age for _, age in found.stale} <= {bound, None}
    assert surplus or None not in {age for _, age in found.stale}
    # At most what the steps within the bound assign is left to be begun.
    assert len(left) <= (size + surplus) * (2 * bound + 1) + size
