"""Groups are dealt to replicas of an engine, and those of a lost one are sampled again at the others."""

import asyncio
from collections import Counter

import pytest

from tasks.inference.engine.client import ServedModel
from tasks.inference.sampling import replicas
from tasks.inference.sampling.replicas import Replicas

A, B, C = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))


def bring() -> ServedModel:
    """Return where the policy is served: nothing is there again."""
    return ServedModel(A, "key")


class Work:
    """Groups that are sampled until they are let go, with the replica of each time that one was begun."""

    def __init__(self, pool: Replicas) -> None:
        self.pool = pool
        self.begun: list[tuple[str, str]] = []
        self.free = asyncio.Event()

    async def sample(self, group: str) -> None:
        self.begun.append((group, self.pool.url_of(group)))
        await self.free.wait()

    async def run(self, group: str) -> int:
        """Return how often the group was begun."""
        count = 1
        while not await self.pool.run(group, lambda: self.sample(group)):
            count += 1
        return count


async def started(work: Work, count: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(work.run(f"group {number}")) for number in range(count)]
    while len(work.begun) < count:
        await asyncio.sleep(0)
    return tasks


def test_each_group_goes_to_the_replica_that_has_fewest() -> None:
    async def run() -> None:
        work = Work(Replicas([A, B, C], 3, bring))
        tasks = await started(work, 9)
        assert Counter(url for _, url in work.begun) == {A: 3, B: 3, C: 3}
        work.free.set()
        assert await asyncio.gather(*tasks) == [1] * 9

    asyncio.run(run())


def test_groups_of_a_lost_replica_are_begun_again_elsewhere_and_those_that_ended_are_not() -> None:
    async def run() -> None:
        pool = Replicas([A, B], 2, bring)
        work = Work(pool)
        tasks = await started(work, 6)
        ended, *others = [group for group, url in work.begun if url == B]
        pool.finish(ended)  # its rollouts have ended, and it is being committed
        assert pool.survive(B) and pool.survive(B), "who notices it second need not care"
        while len(work.begun) < 6 + len(others):
            await asyncio.sleep(0)
        assert [url for _, url in work.begun[6:]] == [A] * len(others)
        assert {group for group, _ in work.begun[6:]} == set(others)
        assert not pool.survive(A), "the last one is the engine"
        work.free.set()
        assert sum(await asyncio.gather(*tasks)) == 6 + len(others)

    asyncio.run(run())


def test_without_a_way_back_a_lost_replica_is_the_loss_of_the_engine() -> None:
    pool = Replicas([A, B], 2, None)
    assert not pool.survive(B)
    assert not Replicas([A, B], 2, bring).survive(C), "of somebody else"


def test_what_sampling_raises_is_raised_and_who_waits_can_be_cancelled() -> None:
    async def fail() -> None:
        raise LookupError("an environment of others")

    async def run() -> None:
        pool = Replicas([A, B], 2, bring)
        with pytest.raises(LookupError):
            await pool.run("group", fail)
        work = Work(pool)
        (task,) = await started(work, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_a_replica_joins_when_it_serves_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "JOIN_SECONDS", 0.01)
    answers = [ServedModel(A, "key"), ServedModel(A, "key", other_urls=(C,))]

    async def run() -> None:
        joined = list[ServedModel]()
        pool = Replicas([A, B], 2, lambda: answers.pop(0))
        following = asyncio.create_task(pool.follow(joined.append))
        await asyncio.sleep(0.05)
        assert len(answers) == 2, "nothing is missing"
        pool.survive(B)
        while not joined:
            await asyncio.sleep(0.01)
        assert pool.urls == [A, C] and joined[0].urls == (A, C)
        # One of others comes back under its own address, and may be lost again.
        answers.append(ServedModel(A, "key", other_urls=(C,)))
        assert pool.survive(C)
        while len(joined) < 2:
            await asyncio.sleep(0.01)
        assert pool.urls == [A, C] and pool.survive(C) and pool.urls == [A]
        following.cancel()

    asyncio.run(run())
