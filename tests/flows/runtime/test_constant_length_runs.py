"""Runs whose algorithm counts rollouts for a constant length: what they share with others, and what they train on."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from storage.store import Store
from tests.fixtures.rehearsal import rehearse

LENGTH = 50


def read(store: Store, run: str, stage: str, table: str) -> list[pa.Table]:
    return [store.read(entry.slices(table)) for entry in store.ledger.entries(run=run, stage=stage)]


def test_dr_grpo_shares_all_before_the_credits_with_grpo_and_divides_by_its_constant(tmp_path: Path) -> None:
    rehearse(tmp_path, "grpo", algorithm={"type": "grpo"})
    store = rehearse(tmp_path, "dr", algorithm={"type": "dr_grpo", "length_normaliser": LENGTH})
    keys = {
        stage: [{entry.key for entry in store.ledger.entries(run=run, stage=stage)} for run in ("grpo", "dr")]
        for stage in ("rollout", "filtering", "advantage", "packing")
    }
    # Step 0 of both has the same policy; later ones are trained apart.
    assert {stage: len(one & other) for stage, (one, other) in keys.items()} == {
        "rollout": 1,
        "filtering": 1,
        "advantage": 0,
        "packing": 0,
    }
    for batches in read(store, "dr", "packing", "batches"):
        weights = np.concatenate(batches["rl_weights"].to_pylist())
        traces = {name.partition("/")[0] for row in batches["sample_ids"].to_pylist() for name in row}
        (num_tokens,) = set(batches["rl_tokens"].to_pylist())
        assert np.count_nonzero(weights) == num_tokens > 0
        assert set(weights[weights != 0]) == {np.float32(num_tokens / (LENGTH * len(traces)))}
    for batches in read(store, "grpo", "packing", "batches"):
        assert set(np.concatenate(batches["rl_weights"].to_pylist())) == {0, 1}
