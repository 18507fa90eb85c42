"""Recorded steps whose rollouts are sampled again by a real engine, with another temperature."""

import pytest

from storage.store import open_store
from tasks.learner.tiny import tiny_qwen3
from tests.acceptance.lives import SMALL, stagecoach
from tests.fixtures.driving import finished

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1200)]
TEMPERATURE = 0.5


def stored(store, run, stage, table):
    """Return the rows of a table that a stage of a run made, step by step."""
    entries = sorted(store.ledger.entries(run=run, stage=stage), key=lambda entry: entry.step)
    return store.read([piece for each in entries if not each.part for piece in each.slices(table)]).to_pylist()


def test_steps_are_sampled_again_each_with_the_policy_that_it_had(tmp_path):
    model, place = tiny_qwen3(tmp_path / "model", seed=3), ["--store", str(tmp_path / "store")]
    stagecoach("run", "demo", SMALL, f"model.path={model}", "--name", "run", *place)
    before = {entry.key for entry in finished(open_store(tmp_path / "store"))}
    chosen = ["--steps", "1:3", "--policies", "recorded", "--name", "cooler", *place]
    said = stagecoach("replay", "run", "--set", f"rollout.temperature={TEMPERATURE}", *chosen)
    assert "2 steps" in said and "step 3/3" in said and "weights part from the recorded ones at step 1" in said

    store = open_store(tmp_path / "store")
    assert {entry.key for entry in finished(store) if entry.run == "run"} == before
    recorded = [row for row in stored(store, "run", "rollout", "traces") if row["policy_version"] > 0]
    again = stored(store, "cooler", "rollout", "traces")
    assert {row["temperature"] for row in again} == {TEMPERATURE}
    for name in ("assignment_id", "policy_key", "policy_version"):
        assert sorted(row[name] for row in again) == sorted(row[name] for row in recorded), name
    assert {row["trace_id"] for row in again}.isdisjoint(row["trace_id"] for row in recorded)
    updates = stored(store, "cooler", "training", "updates")
    assert {row["policy_key_in"] for row in updates} == {row["policy_key"] for row in recorded}
    assert all(row["mismatch_kl_max"] < 1e-6 for row in updates), "log-probs at the temperature that was sampled with"
