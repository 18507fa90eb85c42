"""Groups that a sampler begins no more, because a newer policy is there: all of a group's members run, or none."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from tasks.inference.sampling.limits import GroupQuota, Limiter
from tasks.inference.sampling.rollouts import BatchSampler, SamplingPlan
from tests.fixtures.hosts import assigned


class Instant:
    """Stands in for the runner of rollouts: notes what is begun, and makes the plan outdated at a rollout."""

    def __init__(self, last: str) -> None:
        self.last, self.begun, self.outdated = last, list[str](), False

    async def run(self, assignment: dict[str, Any], task: dict[str, Any]) -> Any:
        self.begun.append(assignment["assignment_id"])
        self.outdated = self.outdated or assignment["assignment_id"] == self.last
        await asyncio.sleep(0)
        return [], []


@pytest.mark.parametrize(
    ("last", "most", "groups"), [("a/1", 1, "a"), ("b/0", 2, "ab"), ("a/0", 12, "a"), ("never", 1, "abc")]
)
def test_an_outdated_plan_ends_what_is_begun_and_begins_nothing(last: str, most: int, groups: str) -> None:
    runner, handed = Instant(last), list[str]()
    sampler: Any = object.__new__(BatchSampler)
    sampler.runner, sampler.quota = runner, GroupQuota({})
    sampler.plan = SamplingPlan(outdated=lambda: runner.outdated)
    sampler.limiter, sampler.in_flight, sampler.begun = Limiter(most), set(), set()
    sampler.on_group = lambda group_id, _: handed.append(group_id)
    rows = assigned("e", list("abc"), 4).to_pylist()
    tasks = {("e", row["example_id"]): "{}" for row in rows}

    async def sample() -> None:
        sampler.commit_lock = asyncio.Lock()
        await sampler._sample_groups(rows, tasks)

    asyncio.run(sample())
    assert sorted(handed) == list(groups)
    assert Counter(each.partition("/")[0] for each in runner.begun) == dict.fromkeys(groups, 4)
    assert not sampler.in_flight
