"""Metrics of tokens, by environment too, and of optimizer steps: exact values, and the same names in every scope."""

import math
from typing import Any

import pyarrow as pa
import pytest

from storage.schemas.stage_tables import BATCHES, TOKEN_MASKS, TOKEN_STATISTICS
from tasks.metrics.figures import full_name
from tasks.metrics.updates import token_metrics, update_metrics
from tests.fixtures.builders import table

ENVIRONMENTS = {"a/0": "math", "b/0": "chat", "c/0": "math"}


def named(*given: Any) -> dict[str, float]:
    """The metrics of tokens by their full names."""
    return {full_name(*name): value for name, value in token_metrics(*given).items()}


def batch(ids: list[str], borders: list[int], **streams: list[float]) -> dict[str, Any]:
    zero = [0.0] * borders[-1]
    names = ("logprobs", "temperatures", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")
    filled = {name: streams.get(name, zero) for name in names}
    return {"sample_ids": ids, "cu_seqlens": borders, "token_ids": [0] * borders[-1], **filled}


def numbered(rows: list[dict[str, Any]]) -> pa.Table:
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


def test_metrics_of_tokens_by_hand() -> None:
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
        "ratio/math/q0.5": 2,
        "ratio/math/q0.01": 1.02,
        "ratio/all/q0.99": 2 + 0.98 * 2,
        "ce_nll/math/mean": 4,
        "ce_nll/all/max": 4,
        # log pi_ref is q + A = -0.5, and l is -1.25.
        "ref_kl/chat/mean": -0.75,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert not {"entropy/chat", "mismatch_kl/chat/mean", "ce_nll/chat/mean", "ref_kl/math/mean"} & found.keys()
    assert all(type(value) is float for value in found.values())


def test_scopes_of_tokens_are_symmetric() -> None:
    """With one environment, it and the whole have the same names and the same numbers."""
    found = token_metrics(BATCHED, STATISTICS, MASKS, dict.fromkeys(ENVIRONMENTS, "one"))
    scopes: dict[str, dict[str, float]] = {"all": {}, "one": {}}
    for (scope, name), value in found.items():
        scopes[scope][name] = value
    assert scopes["all"] == scopes["one"]
    assert len(scopes["all"]) > 20


def test_masks_that_are_not_known_give_no_metric_and_none_masked_gives_zero() -> None:
    unknown = named(BATCHED, STATISTICS, None, ENVIRONMENTS)
    assert not [name for name in unknown if "masked" in name]
    none = named(BATCHED, STATISTICS, TOKEN_MASKS.arrow.empty_table(), ENVIRONMENTS)
    assert none["masked_fraction/all"] == 0
    assert none["mismatch_kl_unmasked/all/mean"] == none["mismatch_kl/all/mean"]
    assert "mismatch_kl_masked/all/mean" not in none
    assert unknown.items() <= none.items()


def test_an_infinite_ratio_makes_metrics_that_are_not_finite_and_says_so() -> None:
    distant = STATISTICS.set_column(
        1, STATISTICS.schema.field(1), pa.array([[0, 2000.0, 0], [0, -1, -2], [0, -1]], STATISTICS.schema.field(1).type)
    )
    found = named(BATCHED, distant, MASKS, ENVIRONMENTS)
    assert math.isinf(found["mismatch_kl/math/max"]) and not math.isfinite(found["mismatch_kl/all/std"])
    assert math.isfinite(found["entropy/math"])


def updated(**changes: Any) -> dict[str, Any]:
    """A row of updates with every number 0."""
    counts = ("num_rows", "num_tokens", "rl_tokens", "ce_tokens", "ref_kl_tokens")
    return {**dict.fromkeys(counts, 0), "metrics": "{}", "policy_key_in": "k", **changes}


def test_several_updates_on_a_batch_have_a_mean_and_ends() -> None:
    rows = [updated(loss=loss, entropy=None, rl_tokens=2, ref_kl_tokens=1, num_tokens=5) for loss in (1.0, 4.0)]
    found = update_metrics(rows)
    assert (found["update/loss"], found["updates"]) == (4.0, 2.0), "the last one"
    assert [found[f"updates/loss/{end}"] for end in ("mean", "min", "max")] == [2.5, 1.0, 4.0]
    assert not {"update/entropy", "updates/entropy/mean", "update/policy_key_in"} & found.keys()
    assert found["updates/weighted_tokens"] == 4, "reference KL is of tokens that the rl component has"
    assert found["updates/num_tokens"] == 10 and update_metrics([]) == {}


def test_what_is_not_finite_stays_so_whatever_the_order() -> None:
    further = '{"not_finite": ["worst"], "clipped": true, "extra": 2}'
    for rows in ([updated(loss=math.nan), updated(loss=1.0)], [updated(loss=1.0), updated(loss=math.nan)]):
        found = update_metrics([*rows[:-1], rows[-1] | {"metrics": further}])
        assert all(math.isnan(found[f"updates/loss/{end}"]) for end in ("mean", "min", "max"))
        assert math.isnan(found["update/worst"]) and found["update/extra"] == 2
