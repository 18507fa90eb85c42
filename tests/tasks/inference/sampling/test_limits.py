"""The quota of groups; and engines with and without a key."""

import asyncio

import pytest
from aiohttp import web

from tasks.inference.engine.client import ServedModel
from tasks.inference.engine.metrics import read_page
from tasks.inference.sampling import lost_servers
from tasks.inference.sampling.limits import GroupQuota, StoppedEarly
from tasks.inference.sampling.lost_servers import ServiceLost, ServiceWatch
from tests.fixtures.endpoints import endpoint
from tests.fixtures.faults import happened
from tests.fixtures.waiting import in_loop


async def stopped(quota, environment, began):
    try:
        async with quota.stop_when_reached(environment):
            began.set()
            await asyncio.Event().wait()
    except StoppedEarly:
        return f"{environment} stopped"
    return "ended"


@in_loop
async def test_the_last_group_that_is_needed_stops_the_others_of_its_environment():
    quota = GroupQuota({"a": 2})
    began = [asyncio.Event() for _ in range(3)]
    a, also, b = (asyncio.create_task(stopped(quota, *one)) for one in zip("aab", began, strict=True))
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


@in_loop
async def test_what_comes_later_is_not_begun():
    began = asyncio.Event()
    assert await stopped(GroupQuota({"a": 0}), "a", began) == "a stopped"
    assert not began.is_set()


@in_loop
async def test_another_time_limit_and_a_cancellation_are_not_taken_for_it():
    quota = GroupQuota({"a": 1})
    with pytest.raises(TimeoutError):
        async with quota.stop_when_reached("a"):
            raise TimeoutError("the environment's own")
    task = asyncio.create_task(stopped(quota, "a", began := asyncio.Event()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


PAGE = "vllm:num_preemptions_total 4\n"


async def asked(key, status, question):
    """Ask a server that answers every path with one status, and wants the key."""

    async def answer(request):
        assert request.headers.get("Authorization") == (f"Bearer {key}" if key else None)
        return web.Response(text=PAGE, status=status)

    async with endpoint(answer, "/{path}") as url:
        return await question(ServedModel(url, key))


async def lives(served):
    """Whether it lives, as those ask who sample with it."""
    watch = ServiceWatch((served,), {})
    ends = [asyncio.create_task(each) for each in (watch.follow_engines(), watch.wait_for_engines())]
    done, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    for task in done:
        task.result()


@pytest.mark.parametrize("key", ["", "secret"])
def test_a_page_of_metrics_is_read_with_the_key_and_a_server_that_falters_has_none_yet(key):
    async def read(served):
        return await asyncio.to_thread(read_page, served.url, served.api_key)

    pages = [asyncio.run(asked(key, status, read)) for status in (200, 404, 503)]
    assert pages == [PAGE, "", None]


@pytest.mark.parametrize("key", ["", "secret"])
def test_an_engine_that_died_behind_its_server_is_lost(key):
    asyncio.run(asked(key, 200, lives))
    with pytest.raises(ServiceLost, match="its server answers 503"):
        asyncio.run(asked(key, 503, lives))


@pytest.mark.fault("services", "an engine of others answers nothing", "time stands still, and it is lost in the end")
@in_loop
async def test_an_engine_that_nobody_restarts_is_lost_in_the_end(monkeypatch):
    monkeypatch.setattr(lost_servers, "SILENT_SECONDS", 0.2)

    answers = asyncio.Event()
    answers.set()

    async def answer(request):
        await answers.wait()
        return web.Response()

    async with endpoint(answer, "/{path}") as url:
        watch = ServiceWatch((ServedModel(url, ""),), {}, silent_seconds=1.0)
        following = asyncio.create_task(watch.follow_engines())
        assert await watch.engines_answer()
        answers.clear()
        assert not await watch.engines_answer()
        happened(f"{url} answers nothing")
        counted = watch.clock.now()
        await asyncio.sleep(0.2)
        assert watch.clock.now() == counted
        answers.set()
        await watch.wait_for_engines()
        answers.clear()
        with pytest.raises(ServiceLost, match=r"it has not answered for \d+ s"):
            await following
        answers.set()
