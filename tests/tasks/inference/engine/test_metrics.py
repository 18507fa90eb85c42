"""What engines count: pages of metrics, counters that begin at zero again, and engines that say nothing."""

import asyncio

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import ENGINE_METRICS
from tasks.inference.engine.client import ServedModel
from tasks.inference.engine.metrics import EngineMeter, EngineMetrics, parse_page
from tests.fixtures.endpoints import endpoint


def page(tokens, started=None, requests=None, running=0):
    """A page of metrics of an engine that has sampled so many tokens."""
    lines = [
        "# HELP vllm:generation_tokens_total Number of generation tokens processed.",
        "# TYPE vllm:generation_tokens_total counter",
        f'vllm:generation_tokens_total{{engine="0",model_name="a b"}} {tokens}',
        "# TYPE vllm:num_requests_running gauge",
        f'vllm:num_requests_running{{engine="0"}} {running}',
        f'vllm:num_requests_running{{engine="1"}} {running}',
        "# TYPE vllm:kv_cache_usage_perc gauge",
        'vllm:kv_cache_usage_perc{engine="0"} 0.25',
        'vllm:kv_cache_usage_perc{engine="1"} 0.5',
        "# TYPE vllm:request_success_total counter",
        *(f'vllm:request_success_total{{finished_reason="{why}"}} {count}' for why, count in (requests or {}).items()),
    ]
    if started is not None:
        lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started}"]
    return "\n".join(lines) + "\n"


def metered(*pages):
    meter = EngineMeter()
    assert all([meter.add(each) for each in pages])
    return meter.values()


def test_what_was_counted_before_is_not_of_this_step():
    found = metered(page(100, requests={"stop": 4}, running=1), page(130, requests={"stop": 6, "length": 3}, running=2))
    assert found["generation_tokens"] == 30 and found["requests"] == 2 + 3, "a reason that is new began at zero"
    assert (found["running_max"], found["running_sum"], found["readings"]) == (4, 6, 2), "of two cores"
    assert found["cache_use_max"] == 0.5 and found["restarts"] == found["failed_readings"] == 0


def test_an_engine_that_was_started_again_begins_at_zero():
    assert metered(page(100), page(120), page(7), page(9))["generation_tokens"] == 20 + 9
    again = metered(page(100, started=1.0), page(150, started=2.0))
    assert (again["generation_tokens"], again["restarts"]) == (150, 1), "it has counted more than before already"
    fewer = metered(page(10, requests={"stop": 5}), page(20, requests={"stop": 1}))
    assert (fewer["generation_tokens"], fewer["requests"]) == (20, 1), "one counter that fell tells of all"


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 50))
def test_all_is_counted_whatever_the_restarts(lives, before):
    """Each life of an engine is read after each of its steps; the first reading is of an engine that has counted."""
    pages, total = [page(before, started=0)], 0
    for number, life in enumerate(lives):
        count = 0 if number else before
        for tokens in life:
            count += tokens
            total += tokens
            pages.append(page(count, started=number))
    found = metered(*pages)
    assert found.get("generation_tokens", 0) == total and found["restarts"] == len(lives) - 1


@pytest.mark.parametrize("text", ["", "<html>not found</html>", "vllm:generation_tokens_total{", "a 1\n"])
def test_a_page_that_is_none_counts_nothing(text):
    meter = EngineMeter()
    assert parse_page(text)[0] == {} and not meter.add(text) and meter.values() == {}


def test_latencies_are_counted_by_bound():
    lines = ["# TYPE vllm:time_to_first_token_seconds histogram"]
    for le, count in (("0.1", 1), ("1.0", 3), ("+Inf", 3)):
        lines.append(f'vllm:time_to_first_token_seconds_bucket{{le="{le}"}} {count}')
    lines += ["vllm:time_to_first_token_seconds_count 3", "vllm:time_to_first_token_seconds_sum 1.2", ""]
    found = metered(page(0), page(0) + "\n".join(lines))
    latency = {name: value for name, value in found.items() if name.startswith("first_token")}
    assert latency == {
        "first_token_le_0.1": 1,
        "first_token_le_1.0": 3,
        "first_token_le_inf": 3,
        "first_token_count": 3,
        "first_token_sum": 1.2,
    }


def read_by(use, *pages):
    """What `use` returns of the URL of an engine that answers with these pages one by one, an empty one with 503."""
    texts = iter(pages)

    async def respond(request):
        assert request.headers["Authorization"] == "Bearer key"
        text = next(texts)
        return web.Response(text=text, status=200 if text else 503)

    async def serve():
        async with endpoint(respond, "/metrics") as url:
            return await asyncio.to_thread(use, url)

    return asyncio.run(serve())


def test_engines_are_read_at_both_ends_and_one_that_is_gone_is_noted():
    def measure(url):
        counted = EngineMetrics([ServedModel(url, "key"), ServedModel("http://127.0.0.1:9", "")])
        with counted.measure():
            pass
        rows = counted.take()
        counted.read()
        return rows, counted.meters["http://127.0.0.1:9"], counted.meters[url]

    rows, gone, failing = read_by(measure, page(5), page(8), "")
    check_rows(rows, ENGINE_METRICS, RowPlace("engine_metrics"))
    found = {row["name"]: row["value"] for row in rows.to_pylist()}
    assert found["generation_tokens"] == 3 and found["seconds"] >= 0 and set(rows["engine"].to_pylist()) == {0}
    assert (gone.failures, gone.values(), failing.failures) == (3, {}, 1)


def test_what_is_taken_is_counted_once_and_up_to_the_last_reading():
    def measure(url):
        counted = EngineMetrics([ServedModel(url, "key")])
        with counted.measure():
            taken = [counted.take()]
            counted.read()
            taken += [counted.take(), counted.take()]
            counted.read()
        return [{row["name"]: row["value"] for row in rows.to_pylist()} for rows in (*taken, counted.take())]

    pages = page(5), page(8), page(12, running=3), page(1, running=1)
    nothing, first, again, rest = read_by(measure, *pages)
    assert nothing == again == {} and (first["generation_tokens"], first["readings"]) == (3, 2)
    assert (rest["generation_tokens"], rest["restarts"], rest["running_max"]) == (4 + 1, 1, 6)
    assert first["seconds"] > 0 and rest["seconds"] > 0
