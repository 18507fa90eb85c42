"""Metrics of a step that took its rollouts from a stream, by hand."""

import pytest

from tasks.metrics.stream import load_metrics, stream_metrics
from tests.fixtures.builders import table, trace, verdict

LIMIT = {"max_in_flight": 8, "num_ended": 3}
MEASURES = ("num_cancelled", "seconds", "in_flight", "idle_seconds", "learner_waited_seconds")


def test_means_are_over_time():
    readings = [(1, 1.0, 8.0, 0.0, 1.0), (2, 3.0, 4.0, 1.0, 0.0), (0, 0.0, 1.0, 0.0, 0.0)]
    rows = [LIMIT | dict(zip(MEASURES, reading, strict=True)) for reading in readings]
    assert load_metrics(rows) == {
        "seconds": 4.0,
        "engine_idle": 0.25,
        "learner_waited": 0.25,
        "in_flight": 5.0,
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
    verdicts = [verdict(name, reason="truncated" if name == "dropped" else None) for name in versions]
    names = ("trace_id", "message", "start", "num_tokens", "policy_key", "policy_version")
    runs = [dict(zip(names, run, strict=True)) for run in (("b", 1, 0, 20, "p", 1), ("b", 1, 20, 10, "p", 2))]
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
