"""Metrics of engines: sums, rates over several intervals, latencies by hand and by property, and none of no rows."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.schemas.stage_tables import ENGINE_METRICS
from tasks.metrics.engines import engine_metrics, histogram_quantile
from tasks.metrics.stage import STAGE
from tests.fixtures.builders import table, trace, view
from tests.fixtures.stages import metrics


def counted(interval, engine=0, **values):
    return [{"interval": interval, "engine": engine, "name": name, "value": value} for name, value in values.items()]


ROWS = [
    *counted("a", seconds=4, generation_tokens=100, requests=2, restarts=1, failed_readings=1),
    *counted("a", running_max=3, running_sum=4, readings=2, prefix_cache_queries=10, prefix_cache_hits=4),
    *counted("a", 1, seconds=5, generation_tokens=50, requests=1, running_max=2, running_sum=2, readings=2),
    *counted("b", seconds=5, generation_tokens=50, requests=1, running_max=9, running_sum=18, readings=2),
]


def test_sums_rates_and_gauges_by_hand():
    found = engine_metrics(table("engine_metrics", ROWS))
    assert found == {
        "engine/seconds": 10.0,  # the longest of those of the first interval, which is that of both engines
        "engine/prompt_tokens": 0.0,
        "engine/generation_tokens": 200.0,
        "engine/requests": 4.0,
        "engine/preemptions": 0.0,
        "engine/restarts": 1.0,
        "engine/failed_readings": 1.0,
        "engine/prompt_tokens_per_second": 0.0,
        "engine/generation_tokens_per_second": 20.0,
        "engine/requests_per_second": 0.4,
        "engine/prefix_cache_hit_rate": 0.4,
        "engine/running_max": 9.0,
        "engine/running_mean": 4.0,
    }
    assert engine_metrics(ENGINE_METRICS.arrow.empty_table()) == {}


def test_latencies_of_several_intervals_are_of_all_that_they_counted():
    buckets = {"queue_le_1.0": 1.0, "queue_le_2.0": 3.0, "queue_le_inf": 4.0}
    rows = [
        *counted("a", queue_sum=3.0, queue_count=4.0, **buckets),
        *counted("b", queue_sum=1.0, queue_count=4.0, **buckets),
    ]
    found = engine_metrics(table("engine_metrics", rows))
    assert found["engine/queue_seconds_mean"] == 0.5
    assert found["engine/queue_seconds_p50"] == 1.5 and found["engine/queue_seconds_p95"] == 2.0
    assert "engine/request_seconds_mean" not in found


@given(st.lists(st.floats(0, 9.99), min_size=1, max_size=40), st.sampled_from([0.5, 0.95]))
def test_a_quantile_lies_in_the_bucket_of_the_value(values, share):
    edges = [*range(1, 11), float("inf")]
    bounds = [(float(edge), float(sum(value <= edge for value in values))) for edge in edges]
    exact = np.quantile(values, share, method="inverted_cdf")
    assert abs(histogram_quantile(bounds, share) - exact) <= 1


def test_a_step_has_them_among_its_metrics_where_an_engine_counted():
    tables = {"traces": table("traces", [trace()])}
    names = [
        Counter(metrics(each, view(STAGE), parameters=1)["metrics"]["name"].to_pylist())
        for each in (tables, tables | {"engine_metrics": table("engine_metrics", ROWS)})
    ]
    more = names[1] - names[0]
    assert set(more) == set(engine_metrics(table("engine_metrics", ROWS))) and names[1] - more == names[0]


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (1.0, 3.0)])
def test_what_lies_above_the_last_bound_counts_as_that(share, value):
    assert histogram_quantile([(2.0, 1.0), (3.0, 1.0), (float("inf"), 2.0)], share) == value
