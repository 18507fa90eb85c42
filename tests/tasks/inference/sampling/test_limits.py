"""The limits on rollouts in flight: the rule, the limiter, the quota of groups; and engines with and without a key."""

import asyncio
from dataclasses import replace

import pytest
from aiohttp import web

from tasks.inference.engine.client import ServedModel
from tasks.inference.engine.metrics import read_page
from tasks.inference.sampling import lost_servers
from tasks.inference.sampling.limits import PATIENCE, AdaptiveLimit, GroupQuota, Limiter, StoppedEarly
from tasks.inference.sampling.load_meter import EngineLoad, load_of_page
from tasks.inference.sampling.lost_servers import ServiceLost, ServiceWatch
from tests.fixtures.endpoints import endpoint
from tests.fixtures.faults import happened
from tests.fixtures.waiting import in_loop

CALM = EngineLoad(running=8, waiting=0, cache_use=0.5, preemptions=2)
PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b} c"} 3.0
vllm:num_requests_running{engine="1",model_name="a {b} c"} 2.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:num_preemptions_total{engine="0"} 4.0
vllm:num_preemptions_created{engine="0"} 1.7e+09
"""
PAGE_OF_ONE = """vllm:num_requests_running 1
vllm:num_requests_waiting 2
vllm:kv_cache_usage_perc 0.5
vllm:num_preemptions_total 4
"""


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (PAGE, EngineLoad(running=5, waiting=1, cache_use=0.75, preemptions=4)),
        (PAGE_OF_ONE, EngineLoad(1, 2, 0.5, 4)),
        (PAGE_OF_ONE.rsplit("vllm:num_preemptions_total", maxsplit=1)[0], None),
        ("", None),
    ],
    ids=["two cores", "no labels", "one metric less", "no page"],
)
def test_the_load_on_a_page_of_metrics(page, load):
    assert load_of_page(page) == load


WAITING, PREEMPTED = replace(CALM, waiting=1), replace(CALM, preemptions=3)


@pytest.mark.parametrize(
    ("readings", "in_use", "limits"),
    [
        ([CALM, CALM], 64, [12, 16]),  # 64 / 16 more, also after a first reading
        ([CALM], 7, [8]),  # nothing is held back
        ([CALM] * 15, 64, [*range(12, 64, 4), 64, 64]),
        ([replace(CALM, cache_use=0.9)], 64, [8]),
        ([WAITING] * PATIENCE + [WAITING, CALM], 64, [8] * (PATIENCE - 1) + [4, 4, 8]),
        ([WAITING] * (PATIENCE - 1) + [CALM], 64, [8] * (PATIENCE - 1) + [12]),  # the queue is empty again
        ([CALM, PREEMPTED, PREEMPTED], 12, [12, 6, 10]),
        ([CALM, *(replace(CALM, preemptions=3 + n) for n in range(4))], 0, [8, 4, 2, 1, 1]),
        ([PREEMPTED, CALM], 64, [12, 16]),  # another engine in place of the one that counted
        ([None], 0, [64]),
    ],
)
def test_the_rule_by_hand(readings, in_use, limits):
    adaptive = AdaptiveLimit(limiter := Limiter(64))
    limiter.in_use = in_use
    found = []
    for reading in readings:
        adaptive.adjust(reading)
        found.append(limiter.limit)
    assert found == limits


class Crowd:
    """Who is inside a limiter, and in which order they came in."""

    def __init__(self, limiter):
        self.limiter = limiter
        self.came = []
        self.leave = [asyncio.Event() for _ in range(12)]
        self.tasks = [asyncio.create_task(self.visit(number)) for number in range(12)]

    async def visit(self, number):
        async with self.limiter:
            self.came.append(number)
            await self.leave[number].wait()

    async def settled(self):
        for _ in range(4):
            await asyncio.sleep(0)
        return self.came

    async def all_gone(self):
        for event in self.leave:
            event.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.limiter.in_use == 0


@in_loop
async def test_first_come_first_in_and_a_bound_that_moves():
    crowd = Crowd(Limiter(2))
    assert await crowd.settled() == [0, 1]
    crowd.limiter.resize(4)
    assert await crowd.settled() == [0, 1, 2, 3]
    crowd.limiter.resize(1)
    for number in range(3):
        crowd.leave[number].set()
    assert await crowd.settled() == [0, 1, 2, 3], "one is still inside"
    crowd.leave[3].set()
    assert await crowd.settled() == [0, 1, 2, 3, 4]
    await crowd.all_gone()
    assert crowd.came == list(range(12))


@in_loop
async def test_who_gives_up_leaves_no_hole():
    crowd = Crowd(Limiter(2))
    await crowd.settled()
    crowd.tasks[2].cancel()  # while it waits
    crowd.tasks[0].cancel()  # inside
    assert await crowd.settled() == [0, 1, 3]
    crowd.leave[1].set()
    await asyncio.sleep(0)
    crowd.tasks[4].cancel()  # in the very turn in which it is let in
    assert set(await crowd.settled()) >= {0, 1, 3, 5}
    assert crowd.limiter.in_use == 2
    await crowd.all_gone()


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
async def test_what_ended_by_itself_stays_ended():
    quota = GroupQuota({"a": 1})
    async with quota.stop_when_reached("a"):
        pass
    quota.count_group("a")
    await asyncio.sleep(0)  # where a cancellation would come


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


async def asked(key, status, question):
    """Ask a server that answers every path with one status, and wants the key."""

    async def answer(request):
        assert request.headers.get("Authorization") == (f"Bearer {key}" if key else None)
        return web.Response(text=PAGE_OF_ONE, status=status)

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
        return await asyncio.to_thread(read_page, served)

    pages = [asyncio.run(asked(key, status, read)) for status in (200, 404, 503)]
    assert pages == [PAGE_OF_ONE, "", None]


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
