"""Plans of a sampler that a newer policy outdates: groups in flight end, continue with that policy, or are dropped.

And a sampler of a deadly rollout: it costs no group.
"""

import asyncio
import threading
from collections import Counter

import pyarrow as pa
import pytest

from tasks.inference.engine.client import OF_POLICY, EngineLost, ServedModel
from tasks.inference.sampling.crash_isolation import CrashIsolation
from tasks.inference.sampling.limits import GroupQuota, SamplingPlan, WeightUpdate
from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.inference.sampling.rollout_runner import RolloutRunner
from tasks.inference.sampling.sampler import BatchSampler
from tasks.inference.sampling.server_pool import ServerPool
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import assigned

SIZE = 4


class Instant(RolloutRunner):
    """Stands in for the runner of rollouts: notes what is begun, and makes the plan outdated at a rollout.

    Rollouts of groups whose names begin with a capital last until they are let go on, those of others end at once.
    """

    def __init__(self, last=""):
        self.last, self.begun, self.outdated = last, [], False
        self.policy = Policy("old", 0)
        self.ended = []
        self.go_on = asyncio.Event()
        self.served = {OF_POLICY: ServedModel("http://127.0.0.1:9", "")}
        self.unproven, self.oldest, self._turns = None, {}, None

    async def run(self, assignment, task, placed):
        self.begun.append(assignment["assignment_id"])
        self.outdated = self.outdated or assignment["assignment_id"] == self.last
        await asyncio.sleep(0)
        if assignment["group_id"].isupper():
            await self.go_on.wait()
        self.ended.append((assignment["assignment_id"], self.policy.key))
        return [], []

    def update_weights(self, policy, served):
        self.policy = policy
        self.go_on.set()


class Plan(SamplingPlan):
    """A plan that the runner makes outdated; its newer policy comes after it was asked in vain a few times."""

    def __init__(self, runner, weight_update="wait", groups="", in_vain=0):
        super().__init__()
        self.runner, self.weight_update, self.groups, self.left = runner, weight_update, groups, in_vain
        self.noted, self.threads = [], set()

    def is_outdated(self):
        return self.runner.outdated

    def begin(self, group_id, versions):
        self.noted.append(group_id)

    def update_weights(self):
        self.threads.add(threading.get_ident())
        self.left -= 1
        if self.left >= 0:
            return None
        self.runner.outdated = False
        return WeightUpdate(Policy("new", 1), self.runner.served[OF_POLICY], assigned("e", list(self.groups), SIZE))


def sample(runner, plan, groups, most=12, size=SIZE, **parts):
    """Sample some groups, and return those that were handed over."""
    handed, sampler = [], object.__new__(BatchSampler)
    pool = ServerPool({"e": ["tcp://127.0.0.1:9"]}, CrashIsolation())
    parts = {
        "runner": runner,
        "plan": plan,
        "quota": GroupQuota({}),
        "limiter": asyncio.Semaphore(most),
        "servers": pool,
        "score_group": None,
        "records_experts": False,
    } | parts
    parts |= {"begun": set(), "live": {}, "on_group": lambda group_id, _: handed.append(group_id)}
    vars(sampler).update(parts)
    names = sorted({*groups, *getattr(plan, "groups", "")})
    examples = pa.table({"environment": ["e"] * len(names), "example_id": names, "task": ["{}"] * len(names)})

    async def work():
        sampler.commit_lock = asyncio.Lock()
        await sampler._sample_groups(assigned("e", list(groups), size), examples)

    try:
        asyncio.run(work())
    finally:
        assert len(handed) == len(set(handed))
        assert not sampler.live and not pool.in_flight
    return sorted(handed)


@pytest.mark.parametrize(
    ("last", "most", "groups"), [("a/1", 1, "a"), ("b/0", 2, "ab"), ("a/0", 12, "a"), ("never", 1, "abc")]
)
def test_an_outdated_plan_ends_what_is_begun_and_begins_nothing(last, most, groups):
    runner = Instant(last)
    plan = Plan(runner)
    assert sample(runner, plan, "abc", most) == plan.noted == list(groups)
    assert Counter(name.partition("/")[0] for name in runner.begun) == dict.fromkeys(groups, SIZE)


@pytest.mark.parametrize("in_vain", [0, 2])
def test_what_is_begun_continues_with_a_newer_policy(in_vain):
    runner = Instant("B/3")
    plan = Plan(runner, "keep", "acd", in_vain)
    assert sample(runner, plan, "ABc") == ["A", "B", "a", "c", "d"]
    # Both were begun before; `c` had to wait for the newer policy, and is sampled once.
    assert runner.begun[: 2 * SIZE] == [f"{group}/{member}" for group in "AB" for member in range(SIZE)]
    assert Counter(runner.begun) == Counter(f"{group}/{member}" for group in "ABacd" for member in range(SIZE))
    assert {key for _, key in runner.ended} == {"new"}
    assert threading.get_ident() not in plan.threads, "the event loop must not wait for the engine"


@pytest.mark.parametrize(
    ("raised", "expected"), [(ValueError("other weights"), ValueError), (EngineLost("no answer"), ServiceLost)]
)
def test_nothing_is_handed_over_when_an_exchange_fails(raised, expected):
    runner = Instant("A/3")

    class Failing(Plan):
        def update_weights(self):
            runner.go_on._loop.call_soon_threadsafe(runner.go_on.set)
            while len(runner.ended) < SIZE:
                continue
            raise raised

    with pytest.raises(ExceptionGroup) as group:
        sample(runner, Failing(runner, "keep"), "A")
    assert group.group_contains(expected, match=str(raised))
    assert len(runner.ended) == SIZE


def test_what_is_begun_is_dropped():
    runner = Instant("B/3")
    assert sample(runner, Plan(runner, "abort"), "aABc") == ["a"]
    assert not any(name[0].isupper() for name, _ in runner.ended)
