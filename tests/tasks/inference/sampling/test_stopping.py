"""Stopping what is left of an environment when enough of its groups have ended."""

import asyncio

import pytest

from tasks.inference.sampling.limits import GroupQuota, StoppedEarly, straggler_failure


async def stopped(quota: GroupQuota, environment: str, began: asyncio.Event) -> str:
    try:
        async with quota.stop_when_reached(environment):
            began.set()
            await asyncio.Event().wait()
    except StoppedEarly:
        return f"{environment} stopped"
    return "ended"


def test_the_last_group_that_is_needed_stops_the_others_of_its_environment() -> None:
    async def scene() -> None:
        quota = GroupQuota({"a": 2})
        began = [asyncio.Event() for _ in range(3)]
        a, also, b = (
            asyncio.create_task(stopped(quota, name, event)) for name, event in zip("aab", began, strict=True)
        )
        for event in began:
            await event.wait()
        quota.count_group("a")
        await asyncio.sleep(0)
        assert not quota.is_reached("a") and not a.done()
        quota.count_group("b")
        quota.count_group("a")
        assert quota.is_reached("a") and not quota.is_reached("b")
        assert await asyncio.gather(a, also) == ["a stopped", "a stopped"]
        assert not b.done(), "an environment without a number is sampled to the end"
        b.cancel()

    asyncio.run(scene())


def test_what_comes_later_is_not_begun() -> None:
    async def scene() -> bool:
        began = asyncio.Event()
        assert await stopped(GroupQuota({"a": 0}), "a", began) == "a stopped"
        return began.is_set()

    assert not asyncio.run(scene())


def test_what_ended_by_itself_stays_ended() -> None:
    async def scene() -> int:
        quota = GroupQuota({"a": 1})
        async with quota.stop_when_reached("a"):
            value = 3
        quota.count_group("a")
        await asyncio.sleep(0)
        return value

    assert asyncio.run(scene()) == 3


def test_another_time_limit_and_a_cancellation_are_not_taken_for_it() -> None:
    async def scene() -> None:
        quota = GroupQuota({"a": 1})
        with pytest.raises(TimeoutError):
            async with quota.stop_when_reached("a"):
                raise TimeoutError("the environment's own")
        task = asyncio.create_task(stopped(quota, "a", began := asyncio.Event()))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())


def test_rows_say_whether_it_was_begun() -> None:
    begun, not_begun = straggler_failure("words", 2.345), straggler_failure("words", None)
    assert (begun.kind, begun.type, begun.retryable) == ("straggler", "Stopped", False)
    assert "after 2.3 s" in begun.message and "'words'" in begun.message and "oversampling" in begun.message
    assert "before it was begun" in not_begun.message
