"""Plans of a sampler that a newer policy outdates: what is begun ends, goes on with that policy, or is dropped."""

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from tasks.inference.engine.client import EngineLost, ServedModel
from tasks.inference.sampling.limits import GroupQuota, Limiter
from tasks.inference.sampling.lost_servers import ServiceLost
from tasks.inference.sampling.replicas import Replicas
from tasks.inference.sampling.rollout_runner import OF_POLICY, RolloutRunner
from tasks.inference.sampling.sampler import BatchSampler, PreparedGroups, Renewal, SamplingPlan
from tasks.inference.sampling.server_pool import ServerPool
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import assigned

SIZE = 4


class Instant(RolloutRunner):
    """Stands in for the runner of rollouts: notes what is begun, and makes the plan outdated at a rollout.

    Rollouts of groups whose names begin with a capital last until they are let go on, those of others end at once.
    """

    def __init__(self, last: str) -> None:
        self.last, self.begun, self.outdated = last, list[str](), False
        self.policy = Policy("old", 0)
        self.ended = list[tuple[str, str]]()
        self.go_on = asyncio.Event()
        self.served = dict[str, ServedModel]()
        self.unproven = None

    async def run(self, assignment: dict[str, Any], task: dict[str, Any], client: Any) -> Any:
        self.begun.append(assignment["assignment_id"])
        self.outdated = self.outdated or assignment["assignment_id"] == self.last
        await asyncio.sleep(0)
        if assignment["group_id"].isupper():
            await self.go_on.wait()
        self.ended.append((assignment["assignment_id"], self.policy.key))
        return [], []

    def renew(self, policy: Policy, served: ServedModel) -> None:
        self.policy = policy
        self.go_on.set()


def sample(runner: Instant, plan: SamplingPlan, groups: str, most: int = 12) -> list[str]:
    """Sample some groups, and return those that were handed over."""
    handed, sampler = list[str](), object.__new__(BatchSampler)
    pool = ServerPool({"e": ["tcp://127.0.0.1:9"]})
    parts = {
        "runner": runner,
        "plan": replace(plan, streams=True),
        "quota": GroupQuota({}),
        "limiter": Limiter(most),
        "servers": pool,
        "waiting": {},
        "is_isolating": False,
    }
    parts |= {"begun": set(), "live": {}, "stopped": set(), "replicas": Replicas([], 0, None)}
    parts |= {"on_group": lambda group_id, _: handed.append(group_id)}
    vars(sampler).update(parts)

    def prepare(assignments: pa.Table) -> PreparedGroups:
        rows = assignments.to_pylist()
        return PreparedGroups(rows, {("e", row["example_id"]): "{}" for row in rows})

    async def work() -> None:
        sampler.commit_lock = asyncio.Lock()
        await sampler._sample_groups(prepare(assigned("e", list(groups), SIZE)), prepare)

    try:
        asyncio.run(work())
    finally:
        assert len(handed) == len(set(handed))
        assert not sampler.live
    assert not pool.in_flight or plan.drops_begun
    return sorted(handed)


@pytest.mark.parametrize(
    ("last", "most", "groups"), [("a/1", 1, "a"), ("b/0", 2, "ab"), ("a/0", 12, "a"), ("never", 1, "abc")]
)
def test_an_outdated_plan_ends_what_is_begun_and_begins_nothing(last: str, most: int, groups: str) -> None:
    runner, noted = Instant(last), list[str]()
    plan = SamplingPlan(outdated=lambda: runner.outdated, begin=lambda group, _: noted.append(group))
    assert sample(runner, plan, "abc", most) == noted == list(groups)
    assert Counter(each.partition("/")[0] for each in runner.begun) == dict.fromkeys(groups, SIZE)


class Renewing:
    """Gives a newer policy when it is asked, after it was asked in vain a few times."""

    def __init__(self, runner: Instant, groups: str, in_vain: int = 0) -> None:
        self.runner, self.groups, self.left = runner, groups, in_vain
        self.threads = set[int]()

    def __call__(self) -> Renewal | None:
        self.threads.add(threading.get_ident())
        self.left -= 1
        if self.left >= 0:
            return None
        self.runner.outdated = False
        return Renewal(Policy("new", 1), ServedModel("http://127.0.0.1:9", ""), assigned("e", list(self.groups), SIZE))


@pytest.mark.parametrize("in_vain", [0, 2])
def test_what_is_begun_goes_on_with_a_newer_policy(in_vain: int) -> None:
    runner = Instant("B/3")
    renew = Renewing(runner, "acd", in_vain)
    assert sample(runner, SamplingPlan(outdated=lambda: runner.outdated, renew=renew), "ABc") == [
        "A",
        "B",
        "a",
        "c",
        "d",
    ]
    # Both were begun before; `c` had to wait for the newer policy, and is sampled once.
    assert runner.begun[: 2 * SIZE] == [f"{group}/{member}" for group in "AB" for member in range(SIZE)]
    assert Counter(runner.begun) == Counter(f"{group}/{member}" for group in "ABacd" for member in range(SIZE))
    assert {key for _, key in runner.ended} == {"new"}
    assert threading.get_ident() not in renew.threads, "the event loop must not wait for the engine"


def test_nothing_is_handed_over_when_the_weights_turn_out_wrong() -> None:
    runner = Instant("A/3")

    def fail() -> Renewal | None:
        runner.go_on._loop.call_soon_threadsafe(runner.go_on.set)  # type: ignore[attr-defined]
        while len(runner.ended) < SIZE:
            continue
        raise ValueError("other weights")

    with pytest.raises(ExceptionGroup) as raised:
        sample(runner, SamplingPlan(outdated=lambda: runner.outdated, renew=fail), "A")
    assert raised.group_contains(ValueError, match="other weights")
    assert len(runner.ended) == SIZE


def test_the_loss_of_the_engine_in_an_exchange_is_that_of_a_service() -> None:
    runner = Instant("A/3")
    runner.served = {OF_POLICY: ServedModel("http://127.0.0.1:9", "")}

    def lose() -> Renewal | None:
        raise EngineLost("no answer")

    with pytest.raises(ExceptionGroup) as raised:
        sample(runner, SamplingPlan(outdated=lambda: runner.outdated, renew=lose), "A")
    assert raised.group_contains(ServiceLost, match="no answer")


def test_what_is_begun_is_dropped() -> None:
    runner = Instant("B/3")
    plan = SamplingPlan(outdated=lambda: runner.outdated, drops_begun=True)
    assert sample(runner, plan, "aABc") == ["a"]
    assert not any(each[0].isupper() for each, _ in runner.ended)
