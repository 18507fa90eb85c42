"""Metrics of a step that took its rollouts from a stream, by hand."""

import pytest

from tasks.metrics.stream import load_metrics, stream_metrics
from tests.fixtures.builders import table, trace

LOAD = {"requests_running": None, "requests_waiting": None, "cache_use": None, "max_in_flight": 8, "num_ended": 3}


def test_means_are_over_time():
    rows = [
        LOAD
        | {"num_cancelled": 1, "seconds": 1.0, "in_flight": 8.0, "idle_seconds": 0.0, "learner_waited_seconds": 1.0},
        LOAD
        | {
            "num_cancelled": 2,
            "seconds": 3.0,
            "in_flight": 4.0,
            "idle_seconds": 1.0,
            "learner_waited_seconds": 0.0,
            "cache_use": 0.5,
        },
        LOAD
        | {"num_cancelled": 0, "seconds": 0.0, "in_flight": 1.0, "idle_seconds": 0.0, "learner_waited_seconds": 0.0},
    ]
    assert load_metrics(rows) == {
        "seconds": 4.0,
        "engine_idle": 0.25,
        "learner_waited": 0.25,
        "in_flight": 5.0,
        "cache_use": 0.5,
        "cancelled": 0.25,
        "fullness": 0.625,
    }
    assert load_metrics([]) == load_metrics(rows[2:]) == {}


def test_ages_are_of_the_tokens_that_may_be_trained_on():
    versions = {"a": (3, 0), "b": (1, 2), "dropped": (0, 3), "judge": (3, 0)}
    rows = [
        trace(
            name,
            policy_version=version,
            staleness=age,
            num_output_tokens=10 if name == "a" else 30,
            trainable=name != "judge",
        )
        for name, (version, age) in versions.items()
    ]
    verdicts = [
        {"trace_id": name, "group_id": "g", "keep": name != "dropped", "reason": None, "detected": [], "evidence": "{}"}
        for name in versions
    ]
    runs = [
        {
            "trace_id": "b",
            "message": 1,
            "start": start,
            "num_tokens": count,
            "policy_key": "p",
            "policy_version": version,
        }
        for start, count, version in ((0, 20, 1), (20, 10, 2))
    ]
    tables = {"traces": table("traces", rows), "verdicts": table("verdicts", verdicts), "intakes": table("intakes", [])}
    assert stream_metrics(tables) == {
        "stream/token_age/mean": pytest.approx(60 / 40),
        "stream/token_age/max": 2.0,
        "stream/tokens_of_age/0": 0.25,
        "stream/tokens_of_age/2": 0.75,
    }
    found = stream_metrics(tables | {"token_policies": table("token_policies", runs)})
    assert found["stream/token_age/mean"] == pytest.approx((20 * 2 + 10 * 1) / 40)
    assert found["stream/tokens_of_age/1"] == 0.25
    assert stream_metrics({name: rows for name, rows in tables.items() if name != "intakes"}) == {}
