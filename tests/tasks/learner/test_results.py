"""What an optimizer step reports beyond its columns: exact values, and what is not finite has a name."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest

from flows.reporting.tracking import finite
from storage.schemas.stage_tables import TOKEN_MASKS, TOKEN_STATISTICS
from tasks.arrays.samples import COMPONENTS
from tasks.learner import trainer
from tasks.learner.loop import RowStatistics, Totals
from tasks.learner.loss import GROUPS
from tasks.learner.protocol import STATISTICS_FILE
from tasks.learner.rows import PackedBatch, RowPlan
from tasks.metrics.updates import update_metrics
from tasks.training.stage import token_tables, updates_table

pytestmark = pytest.mark.engine

SUMS = ("entropy", "positive", "negative", "masked", "masked_positive", "masked_negative", "truncated", "ce_nll")
LOSSES = ("rl_loss", "ce_loss", "ref_kl_loss", "ref_kl", "ref_kl_masked")


def statistics(learner, masked=None, ids=("a",), borders=None):
    """Return one row's statistics; all streams are given per token."""
    size = len(learner)
    borders = borders or (0, size)
    row = RowPlan(0, 0, ids, borders, borders, 0, {}, {}, None, 0)
    flags, own = np.array(masked or [False] * size), np.array(learner, np.float32)
    return RowStatistics(row, own, np.zeros(size, np.float32), flags)


def measured(counts, **values):
    """Return one update's row from sums by name, and maxima by name with `_max`; all others are zero."""
    mismatch = [f"{group}mismatch_kl" for group in GROUPS]
    sums = dict.fromkeys([*SUMS, *LOSSES, *mismatch, *(f"{name}_squared" for name in mismatch)], 0.0)
    maxima = {"ce_nll": 0.0, **{name: values.pop(f"{name}_max", 0.0) for name in mismatch}}
    assert values.keys() <= sums.keys()
    batch = PackedBatch((), dict.fromkeys(COMPONENTS, 0) | counts, None)
    return trainer.measurements(batch, Totals(sums | values, maxima))


RL = {"rl": 4}


def test_mean_spread_and_maximum_of_the_mismatch_by_group():
    # 1 and 3 masked, 0 and 0 not.
    row = measured(
        RL,
        masked=2.0,
        mismatch_kl=4.0,
        mismatch_kl_squared=10.0,
        masked_mismatch_kl=4.0,
        masked_mismatch_kl_squared=10.0,
        mismatch_kl_max=3.0,
        masked_mismatch_kl_max=3.0,
    )
    assert (row["mismatch_kl"], row["mismatch_kl_max"], row["masked_fraction"]) == (1.0, 3.0, 0.5)
    found = {name: value for name, value in row["metrics"].items() if "mismatch" in name}
    assert found == {
        "mismatch_kl_std": math.sqrt(10 / 4 - 1),
        "masked_mismatch_kl_mean": 2.0,
        "masked_mismatch_kl_std": 1.0,
        "masked_mismatch_kl_max": 3.0,
        "unmasked_mismatch_kl_mean": 0.0,
        "unmasked_mismatch_kl_std": 0.0,
        "unmasked_mismatch_kl_max": 0.0,
    }


def test_fractions_are_of_the_tokens_that_could_be_masked():
    row = measured(RL, masked=3.0, positive=1.0, negative=2.0, masked_positive=1.0, masked_negative=1.0, truncated=1.0)
    names = ("masked_fraction_positive", "masked_fraction_negative", "truncated_fraction")
    assert [row["metrics"][name] for name in names] == [1.0, 0.5, 0.25]
    assert row["masked_fraction"] == 0.75
    nothing = measured({"ce": 3, "ref_kl": 2}, ce_nll=6.0, ref_kl=-1.0, ref_kl_masked=1.0)["metrics"]
    assert [nothing[name] for name in names] == [None] * 3
    assert (nothing["ce_nll_mean"], nothing["ref_kl_mean"], nothing["ref_kl_masked_fraction"]) == (2.0, -0.5, 0.5)


def test_what_is_not_finite_is_null_in_json_and_reaches_the_monitor_s_warning():
    row = measured(RL, mismatch_kl=math.inf, mismatch_kl_squared=math.inf)
    missing = ["mismatch_kl_std"]
    assert row["metrics"]["not_finite"] == missing
    table = updates_table([row])
    strict = json.loads(table["metrics"][0].as_py(), parse_constant=pytest.fail)
    assert {strict[name] for name in missing} == {None}
    update = {**table.to_pylist()[0]}
    kept, dropped = finite(update_metrics([update]))
    of_all = {f"updates/mismatch_kl/{name}" for name in ("mean", "min", "max")}
    assert {f"update/{name}" for name in missing} | {"update/mismatch_kl"} | of_all == set(dropped)
    assert "update/masked_fraction" in kept and "update/not_finite" not in kept


def test_a_finite_step_has_no_such_list():
    assert "not_finite" not in measured(RL)["metrics"]


@pytest.mark.parametrize("tokens_of_a_part", [1, 1 << 25])
def test_masks_have_rows_for_the_samples_that_have_some(tmp_path, monkeypatch, tokens_of_a_part):
    monkeypatch.setattr("tasks.training.stage.TOKENS_OF_A_PART", tokens_of_a_part)
    row = statistics([0, -1, 0, -1, -2], [False, False, False, False, True], ("a", "b"), (0, 2, 5))
    other = statistics([0, -1], [False, True], ("c",))
    made = made_of(tmp_path, [row], [other])
    assert made["token_statistics"].schema.equals(TOKEN_STATISTICS.arrow)
    assert made["token_statistics"]["sample_id"].to_pylist() == ["a", "b", "c"]
    assert made["token_masks"].schema.equals(TOKEN_MASKS.arrow)
    assert made["token_masks"].to_pylist() == [
        {"sample_id": "b", "masked": [False, False, True]},
        {"sample_id": "c", "masked": [False, True]},
    ]


def made_of(directory, *parts):
    """Return the tables that training makes of what the learner wrote in several parts."""
    with trainer.statistics_file(directory) as file:
        for part in parts:
            file.write_table(trainer.statistics_table(part))
    made = {name: list(rows) for name, rows in token_tables(directory / STATISTICS_FILE).items()}
    assert all(part.num_rows for rows in made.values() for part in rows)
    assert not list(directory.iterdir()), "it is no part of the policy"
    return {name: pa.concat_tables(rows) for name, rows in made.items() if rows}


def test_without_any_there_is_no_table(tmp_path):
    made = made_of(tmp_path, [statistics([0, -1])])
    assert made.keys() == {"token_statistics"}
