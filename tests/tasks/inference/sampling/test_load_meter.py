"""How full the engine was and how long the learner waited, by a clock that the test moves."""

import asyncio
import threading
from asyncio import CancelledError

import pytest

from tasks.inference.engine.client import ServedModel
from tasks.inference.sampling import load_meter
from tasks.inference.sampling.load_meter import EngineLoad, LoadMeter, follow_loads
from tests.fixtures.waiting import in_loop

PAGE = """vllm:num_requests_running 1
vllm:num_requests_waiting 2
vllm:kv_cache_usage_perc 0.5
vllm:num_preemptions_total 4
"""


class Clock:
    """Tells the seconds that the test sets."""

    now = 100.0

    def __call__(self):
        return self.now


def test_rollouts_idle_time_and_waits_are_added_up_between_two_readings():
    clock = Clock()
    meter = LoadMeter(clock)
    clock.now += 2  # nothing is under way
    with meter.rollout():
        clock.now += 3
        with meter.rollout(), meter.learner_waits():
            clock.now += 5
    load = meter.read()
    assert (load.seconds, load.idle_seconds, load.learner_waited_seconds) == (10, 2, 5)
    assert load.in_flight == pytest.approx((3 * 1 + 5 * 2) / 10)
    assert load.requests_running is load.requests_waiting is load.cache_use is None
    clock.now += 4
    after = meter.read()
    assert (after.seconds, after.idle_seconds, after.learner_waited_seconds, after.in_flight) == (4, 4, 0, 0)


def test_what_lasts_from_one_reading_to_the_next_counts_in_both():
    clock = Clock()
    meter = LoadMeter(clock)
    with meter.rollout(), meter.learner_waits():
        clock.now += 1
        first = meter.read()
        clock.now += 2
    second = meter.read()
    loads = [(each.seconds, each.in_flight, each.learner_waited_seconds) for each in (first, second)]
    assert loads == [(1, 1, 1), (2, 1, 2)]
    assert meter.read().in_flight == 0, "no time has gone by: as many as there are"


def test_rollouts_that_end_and_those_that_are_stopped_are_told_apart():
    meter = LoadMeter()
    with meter.rollout():
        pass
    for _ in range(2):
        with pytest.raises(CancelledError), meter.rollout():
            raise CancelledError
    load = meter.read()
    assert (load.num_ended, load.num_cancelled) == (1, 2)
    assert meter.read().num_cancelled == 0


def test_reports_of_the_engine_are_means():
    meter = LoadMeter()
    for running, waiting, cache_use in ((2, 0, 0.5), (4, 1, 0.75)):
        meter.report(EngineLoad(running, waiting, cache_use, 0))
    load = meter.read()
    assert (load.requests_running, load.requests_waiting, load.cache_use) == (3, 0.5, 0.625)
    assert meter.read().requests_running is None


@in_loop
async def test_the_load_is_followed_on_when_a_lost_replica_is_back(monkeypatch, caplog):
    monkeypatch.setattr(load_meter, "INTERVAL_SECONDS", 0.0)

    async def no_metrics(_):
        return ""

    monkeypatch.setattr(load_meter, "read_page_async", no_metrics)
    back = [ServedModel("http://back", "")]
    readings, reports = iter([[], [], back]), []
    await asyncio.wait_for(follow_loads(lambda: next(readings, back), reports.append), 10)
    assert reports == [None] and next(readings, None) is None and not caplog.records


@in_loop
async def test_an_engine_without_a_queue_is_named_once_where_its_load_limits_rollouts(monkeypatch, caplog):
    monkeypatch.setattr(load_meter, "INTERVAL_SECONDS", 0.0)

    async def read_page(engine):
        return "" if engine.url == "http://silent" else PAGE

    monkeypatch.setattr(load_meter, "read_page_async", read_page)
    engines, reports = [ServedModel("http://silent", ""), ServedModel("http://good", "")], []

    def take(load):
        reports.append(load)
        if len(reports) == 3:
            del engines[1]

    await asyncio.wait_for(follow_loads(lambda: engines, take, limits=True), 10)
    assert reports == [*[EngineLoad(1, 2, 0.5, 4)] * 3, None]
    text = "the engine at http://silent reports no queue under /metrics: no limit adapts to it"
    assert [record.getMessage() for record in caplog.records] == [text]


@in_loop
async def test_a_cancelled_reading_leaves_no_thread_behind():
    is_asked = asyncio.Event()

    async def say_nothing(reader, writer):
        is_asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        engine = ServedModel(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "")
        following = asyncio.create_task(follow_loads(lambda: [engine], lambda _: None))
        await is_asked.wait()
        following.cancel()
        await asyncio.wait([following])
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncio_")]
