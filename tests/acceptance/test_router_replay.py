"""A real run of a model with experts: the engine's choice is recorded, trained with, and trained with again."""

import json

import pytest

from storage.store import open_store
from tests.acceptance.lives import SMALL, stagecoach
from tests.fixtures.driving import OTHER_FILTER, rows
from tests.fixtures.family_models import tiny_family

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
STEPS = 2
SETTINGS = (
    "training.router_replay=rollout",
    f"steps={STEPS}",
    "assignment.groups_per_step=2",
    "assignment.group_size=4",
)


def test_experts_are_recorded_replayed_and_a_replay_from_the_store_gives_the_same_weights(tmp_path):
    root = str(tmp_path / "store")
    model = tiny_family(tmp_path / "model", "qwen3_moe", seed=3)
    # A model that has learnt nothing earns nothing; that some of its answers are shorter is a signal.
    signal = "algorithm.overlong={max_tokens=40, buffer_tokens=40}"
    stagecoach("run", "demo", SMALL, "--name", "run", "--store", root, f"model.path={model}", signal, *SETTINGS)
    found = rows(open_store(root))
    recorded = {(row["trace_id"], row["message"]): row for row in found["routed_experts"]}
    for message in found["messages"]:
        row = recorded[message["trace_id"], message["message"]]
        assert (row["width"], row["num_layers"], row["top_k"]) == (1, 2, 2)
        assert len(row["experts"]) == len(message["token_ids"]) * 2 * 2, "four bytes a token"
    assert sum(any(row["experts"]) for row in recorded.values() if row["message"]) > 8
    metrics = [json.loads(row["metrics"]) for row in found["updates"]]
    # In float32 engine and learner choose the same. The last token of a rollout, and what was cached, has no record.
    assert all(0 < each["router_absent_fraction"] < 0.6 for each in metrics)
    assert all(each["router_differing_fraction"] < 0.01 for each in metrics)
    changed = ["--set", OTHER_FILTER, "--name", "again", "--store", root]  # it drops nothing
    stagecoach("replay", "run", *changed)
    store = open_store(root)
    again = rows(store, "again")
    keys = [{entry.key for entry in store.ledger.entries(run=run, stage="training")} for run in ("run", "again")]
    assert len(keys[0]) == len(keys[1]) == STEPS and not keys[0] & keys[1], "it was trained again"
    weights = [[row["weights_sha256"] for row in each["updates"]] for each in (found, again)]
    assert weights[0] == weights[1] and len({*weights[0]}) == STEPS
