"""Metrics of tokens: exact values, the same names in every scope, and the same bits however the rows are cut."""

import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from storage.schemas.stage_tables import BATCHES, TOKEN_MASKS, TOKEN_STATISTICS
from tasks.metrics.figures import full_name
from tasks.metrics.tokens import Moments, NotMeasured, token_metrics
from tasks.runtime.stored_rows import StoredRows
from tests.fixtures.builders import table

ENVIRONMENTS = {"a/0": "math", "b/0": "chat", "c/0": "math"}


def named(batches, statistics, *others):
    """The metrics of tokens by their full names."""
    found = token_metrics(StoredRows.of(batches), StoredRows.of(statistics), *others)
    return {full_name(*name): value for name, value in found.items()}


STREAMS = ("logprobs", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")


def batch(ids, borders, **streams):
    zero = [0.0] * borders[-1]
    filled = {name: streams.get(name, zero) for name in (*STREAMS, "temperatures")}
    return {"sample_ids": ids, "cu_seqlens": borders, "token_ids": [0] * borders[-1], **filled}


def numbered(rows):
    counts = dict.fromkeys(("update", "rank", "micro_step", "rl_tokens", "ce_tokens", "ref_kl_tokens"), 0)
    return pa.Table.from_pylist([{"row": n, **counts, **row} for n, row in enumerate(rows)], schema=BATCHES.arrow)


LOG2 = math.log(2)
BATCHED = numbered(
    [
        batch(
            ["a/0", "b/0"],
            [0, 3, 5],
            logprobs=[0, -1.0, -2.0, 0, -1.0],
            advantages=[0, 1.0, -1.0, 0, 0.5],
            rl_weights=[0, 1.0, 0.5, 0, 0],
            ref_kl_weights=[0, 0, 0, 0, 1.0],
        ),
        batch([], [0, 2]),
        batch(
            ["c/0"], [0, 3], logprobs=[0, -1.0, 0], advantages=[0, 2.0, 0], rl_weights=[0, 1, 0], ce_weights=[0, 0, 2]
        ),
    ]
)
# Log ratios of the rl tokens: log 2 and 0 in a, log 4 in c. In another order than the rows.
STATISTICS = pa.Table.from_pylist(
    [
        {"sample_id": "c/0", "logprobs": [0, 2 * LOG2 - 1.0, -4.0], "entropies": [0, 0.5, 0.25]},
        {"sample_id": "a/0", "logprobs": [0, LOG2 - 1.0, -2.0], "entropies": [0, 1.0, 0.0]},
        {"sample_id": "b/0", "logprobs": [0, -1.25], "entropies": [0, 2.0]},
    ],
    schema=TOKEN_STATISTICS.arrow,
)
MASKS = table("token_masks", [{"sample_id": "c/0", "masked": [False, True, False]}])


def test_metrics_of_tokens_by_hand():
    found = named(BATCHED, STATISTICS, MASKS, ENVIRONMENTS)
    kl = [1 - LOG2, 0.0, 3 - 2 * LOG2]
    average = sum(kl) / 3
    expected = {
        "rl_tokens/all": 3,
        "rl_tokens/math": 3,
        "rl_tokens/chat": 0,
        "ce_tokens/math": 1,
        "ref_kl_tokens/chat": 1,
        "entropy/all": 0.5,
        "entropy/math": 0.5,
        "mismatch_kl/math/mean": average,
        "mismatch_kl/math/std": math.sqrt(sum((each - average) ** 2 for each in kl) / 3),
        "mismatch_kl/all/max": kl[2],
        "mismatch_kl_masked/all/mean": kl[2],
        "mismatch_kl_unmasked/math/mean": kl[0] / 2,
        "masked_fraction/math": 1 / 3,
        "masked_fraction/math/positive": 1 / 2,
        "masked_fraction/math/negative": 0,
        "ce_nll/math/mean": 4,
        "ce_nll/all/max": 4,
        # log pi_ref is q + A = -0.5, and l is -1.25.
        "ref_kl/chat/mean": -0.75,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert not {"entropy/chat", "mismatch_kl/chat/mean", "ce_nll/chat/mean", "ref_kl/math/mean"} & found.keys()
    assert all(type(value) is float for value in found.values())


def test_scopes_of_tokens_are_symmetric():
    """With one environment, it and the whole have the same names and the same numbers."""
    found = token_metrics(StoredRows.of(BATCHED), StoredRows.of(STATISTICS), MASKS, dict.fromkeys(ENVIRONMENTS, "one"))
    scopes = {"all": {}, "one": {}}
    for (scope, name), value in found.items():
        scopes[scope][name] = value
    assert scopes["all"] == scopes["one"]
    assert len(scopes["all"]) > 15


def test_masks_that_are_not_known_give_no_metric_and_none_masked_gives_zero():
    unknown = named(BATCHED, STATISTICS, None, ENVIRONMENTS)
    assert not [name for name in unknown if "masked" in name]
    none = named(BATCHED, STATISTICS, TOKEN_MASKS.arrow.empty_table(), ENVIRONMENTS)
    assert none["masked_fraction/all"] == 0
    assert none["mismatch_kl_unmasked/all/mean"] == none["mismatch_kl/all/mean"]
    assert "mismatch_kl_masked/all/mean" not in none
    assert unknown.items() <= none.items()


@pytest.mark.parametrize("logprob", [2000.0, 600.0], ids=["infinite", "with a square that is"])
def test_a_distant_ratio_makes_metrics_that_are_not_finite(logprob):
    field = STATISTICS.schema.field(1)
    distant = STATISTICS.set_column(1, field, pa.array([[0, logprob, 0], [0, -1, -2], [0, -1]], field.type))
    found = named(BATCHED, distant, MASKS, ENVIRONMENTS)
    assert math.isinf(found["mismatch_kl/math/max"]) == (logprob > 709)
    assert not math.isfinite(found["mismatch_kl/all/std"])
    assert math.isfinite(found["entropy/math"])


def test_a_packed_sample_that_was_not_measured_is_named():
    with pytest.raises(NotMeasured, match="sample c/0"):
        named(BATCHED, STATISTICS.slice(1), MASKS, ENVIRONMENTS)


def generated(rng, samples):
    """Packed rows of two samples each, statistics in the same order, and masks of every second sample."""
    rows, measured, masks = [], [], []
    for first in range(0, len(samples), 2):
        own = samples[first : first + 2]
        borders = [0, *np.cumsum([length for _, length in own]).tolist()]
        size = borders[-1]
        streams = {
            "logprobs": -rng.exponential(1, size),
            "advantages": rng.standard_normal(size) * (rng.random(size) < 0.8),
            "rl_weights": (rng.random(size) < 0.7).astype(float),
            "ce_weights": (rng.random(size) < 0.2).astype(float),
            "ref_kl_weights": (rng.random(size) < 0.2).astype(float),
        }
        rows.append(
            batch([name for name, _ in own], borders, **{name: each.tolist() for name, each in streams.items()})
        )
        rows.append(batch([], [0, 2]))
    for number, (name, size) in enumerate(samples):
        logprobs, entropies = (-rng.exponential(1, size)).tolist(), rng.exponential(1, size).tolist()
        measured.append({"sample_id": name, "logprobs": logprobs, "entropies": entropies})
        masks += [{"sample_id": name, "masked": (rng.random(size) < 0.1).tolist()}] if number % 2 else []
    statistics = pa.Table.from_pylist(measured, schema=TOKEN_STATISTICS.arrow)
    return numbered(rows), statistics, table("token_masks", masks)


def cut(rows, sizes):
    """Rows in parts of so many."""
    borders = [0, *np.cumsum(sizes).tolist(), rows.num_rows]
    parts = [rows.slice(start, end - start) for start, end in pairwise(borders)]
    return StoredRows(
        rows.schema, len(parts), lambda number, names: parts[number].select(list(names or rows.column_names))
    )


@pytest.mark.parametrize("order", ["as trained", "reversed"])
@pytest.mark.parametrize("environments", [("math",), ("math", "chat", "code")])
def test_metrics_of_several_blocks_are_those_of_one_and_have_the_same_bits_for_all_parts(
    environments, order, monkeypatch
):
    rng = np.random.default_rng(3)
    samples = [(f"t{number}/0", int(rng.integers(50, 700))) for number in range(40)]
    batches, statistics, masks = generated(rng, samples)
    if order == "reversed":
        statistics = statistics.take(list(reversed(range(statistics.num_rows))))
    of_samples = {name: environments[number % len(environments)] for number, (name, _) in enumerate(samples)}
    expected = token_metrics(cut(batches, []), cut(statistics, []), masks, of_samples)
    assert len(expected) == (1 + len(environments)) * 20
    monkeypatch.setattr(Moments, "BLOCK", 1 << 9)
    whole = token_metrics(cut(batches, []), cut(statistics, []), masks, of_samples)
    assert whole == pytest.approx(expected, rel=1e-12)
    for of_rows, of_measured in (([1, 0, 7, 12], [3, 11, 1]), ([39], [])):
        assert token_metrics(cut(batches, of_rows), cut(statistics, of_measured), masks, of_samples) == whole
