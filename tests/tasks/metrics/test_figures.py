"""Figures of a batch, worked out by hand, and what they are where there is nothing to make them of."""

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.schemas.stage_tables import TABLES
from tasks.metrics.figures import MEANINGS, batch_figures, credit_figures, mean, spread
from tasks.metrics.rollouts import rollout_metrics
from tests.fixtures.builders import failed, table, trace, verdict


def credit(sample_id, advantage):
    """Return a row of credits; only what figures read of it matters."""
    trace_id = sample_id.partition("/")[0]
    texts = {"sample_id": sample_id, "trace_id": trace_id, "group_id": "g0", "advantage": advantage}
    streams = {name: [] for name in ("path", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")}
    return {**streams, **texts, "branch": 0, "reward": None, "baseline": None, "num_tokens": 0}


def batch(*rows):
    """Return packed rows of so many tokens, each with its samples."""
    columns = TABLES["batches"].arrow
    blank = {name: [] if pa.types.is_list(columns.field(name).type) else 0 for name in columns.names}
    return table("batches", [blank | {"sample_ids": ids, "cu_seqlens": [0, tokens]} for ids, tokens in rows])


def test_every_figure_of_a_small_batch():
    traces = [
        trace("t0", reward=1.0),
        trace("t1", reward=0.0, is_truncated=True),
        trace("t2", group_id="g1", reward=0.5, trainable=False),
        failed("t3", group_id="g1", num_output_tokens=6),
    ]
    verdicts = [verdict("t0"), verdict("t1", reason="truncated"), verdict("t2"), verdict("t3", reason="errored")]
    credits = [credit("t0/0", 1.5), credit("t0/1", -0.5), credit("t2/0", None)]
    batches = batch((["t0/0", "t0/1"], 30), ([], 2))
    rows = {"traces": traces, "verdicts": verdicts, "samples": credits}
    tables = {name: table(name, own) for name, own in rows.items()} | {"batches": batches}
    found = batch_figures(tables, 40)
    assert found == {
        "num_traces": 4,
        "num_groups": 2,
        "reward_mean": 0.5,
        "reward_std": pytest.approx((1 / 6) ** 0.5),
        "reward_min": 0.0,
        "reward_max": 1.0,
        "truncated_ratio": 0.25,
        "errored_ratio": 0.25,
        "output_tokens_mean": 3.0,
        "num_kept": 2,
        "num_trainable": 1,
        "trainable_ratio": 0.25,
        "num_samples": 3,
        "advantage_mean": 0.5,
        "advantage_std": 1.0,
        "num_packed": 2,
        "num_rows": 2,
        "num_tokens": 30,
        "fill": 0.375,
    }
    assert list(found) == list(MEANINGS)


def test_of_nothing_counts_are_zero_and_the_rest_is_unknown():
    found = batch_figures({name: table(name, []) for name in ("traces", "verdicts", "samples", "batches")}, 8)
    assert {name for name, value in found.items() if value == 0} == {name for name in MEANINGS if name[:4] == "num_"}
    assert {name for name, value in found.items() if value is None} == {name for name in MEANINGS if name[:4] != "num_"}


@settings(max_examples=40)
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=12), st.randoms())
def test_advantages_come_to_the_same_to_the_last_bit_in_whatever_order(advantages, random):
    rows = [credit(f"t{n}/0", advantage) for n, advantage in enumerate(advantages)]
    shuffled = random.sample(rows, len(rows))
    assert credit_figures(table("samples", rows)) == credit_figures(table("samples", shuffled))


def test_numbers_whose_sum_exceeds_float64_have_a_mean_and_no_deviation(caplog):
    assert mean([1e308] * 4) == 1e308 and mean([1.5e308, -1.5e308, 1e308, 1e308]) == 5e307
    assert spread([1e308, 0.0]) == {"mean": 5e307, "min": 0.0, "max": 1e308}
    assert "no standard deviation of 2 numbers from 0 to 1e+308" in caplog.text


def test_what_an_environment_measured_never_ends_a_run(caplog):
    metrics = [{"huge": 10**400, "large": 1.7e308}, {"large": 1.7e308}]
    rows = [trace(f"t{n}", reward=1e308, metrics=json.dumps(each)) for n, each in enumerate(metrics)]
    found = rollout_metrics(table("traces", rows), table("verdicts", []))
    assert found["all", "metrics/large"] == 1.7e308 and ("all", "metrics/huge") not in found
    assert found["all", "reward/mean"] == 1e308
    assert "metric 'huge' of a rollout is left out" in caplog.text
