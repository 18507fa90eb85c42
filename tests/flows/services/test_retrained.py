"""Batches that are trained again on CUDA may come out a little differently: how far, and what is trained on then."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.run import RunConfig
from flows.services.learner_recovery import MAX_DIFFERENCE, LearnerRecovery, WeightsDiffer
from storage.store import open_store
from tasks.learner.digest import OPTIMIZER_FILE, relative_difference, weights_sha256
from tasks.learner.protocol import LearnerLost, state_file
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy
from tests.fixtures.builders import table
from tests.fixtures.histories import policy_row, record_policy

WEIGHTS = {"a": np.full((4, 4), 0.02, np.float32), "b": np.linspace(-1, 1, 8, dtype=np.float32)}


def moved(by):
    return {name: (array * (1 + by)).astype(np.float32) for name, array in WEIGHTS.items()}


class Retraining:
    """A learner whose training makes weights that differ by a share from the recorded ones."""

    def __init__(self, by):
        self.by = by
        self.held = {}

    def load(self, policy_key, directory, fresh_optimizer, base="", state_directory=""):
        place = Path(directory)
        state = None if fresh_optimizer else load_file(place / OPTIMIZER_FILE)["state"].tolist()
        self.held = {"key": policy_key, "weights": load_file(place / "model.safetensors"), "state": state}
        self.sha256 = weights_sha256(place)

    def train(self, table, *, directory_out, save_optimizer, policy_key_out, **_):
        place = Path(directory_out)
        save_file(moved(self.by), place / "model.safetensors")
        if save_optimizer:
            save_file({"state": np.array([7.0])}, place / OPTIMIZER_FILE)
        self.held = {"key": policy_key_out, "weights": moved(self.by), "state": [7.0]}
        self.sha256 = weights_sha256(place)

    def state(self):
        return {"weights_sha256": self.sha256}


@pytest.fixture
def context(root, monkeypatch):
    """A run of a first policy, and one that was trained without its optimizer state."""
    store = open_store(root)
    for version, key in enumerate(("first", "second")):
        scratch = store.policies.scratch(key)
        save_file(WEIGHTS if version else moved(0.1), scratch / "model.safetensors")
        digest = weights_sha256(scratch)
        store.policies.publish(scratch, key)
        (row,) = policy_row(key, version, "first" if version else None, has_optimizer=False).to_pylist()
        rows = table("policies", [row | {"weights_sha256": digest}])
        record_policy(store, key, rows)
    monkeypatch.setattr(LearnerRecovery, "_settings", lambda self, row: {})
    monkeypatch.setattr(LearnerRecovery, "_batch", lambda self, row: (0, None))
    return RunContext(store, "a", RunConfig(name="a"), {})


def recover(context, learner, device="cpu", own=(), *kept):
    """Bring a learner to the second policy; return what it holds then."""
    LearnerRecovery(learner, context, ({"device": device}, dict(own)), *kept).recover(Policy("second", 1))
    return learner.held


def test_a_small_difference_on_cuda_goes_on_from_what_is_recorded(context, caplog):
    held = recover(context, Retraining(MAX_DIFFERENCE / 2), "cuda")
    assert held["key"] == "second" and held["state"] == [7.0], "with the state that training again came to"
    assert all((held["weights"][name] == WEIGHTS[name]).all() for name in WEIGHTS)
    assert "differ by 5e-06 of their norm" in caplog.text


@pytest.mark.parametrize(("by", "device"), [(MAX_DIFFERENCE / 2, "cpu"), (MAX_DIFFERENCE * 2, "cuda")])
def test_the_processor_is_exact_and_a_large_difference_stops_everywhere(context, by, device):
    with pytest.raises(WeightsDiffer, match="training its recorded batches again"):
        recover(context, Retraining(by), device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_equal_weights_are_taken_as_they_are(context, device):
    assert recover(context, Retraining(0.0), device)["key"] == "second"


def test_a_learner_that_was_lost_cannot_write_where_the_next_one_trains_again(context):
    given = []

    class Lost(Retraining):
        def train(self, table, *, directory_out, **_):
            given.append(Path(directory_out))
            raise LearnerLost("cut off")

    class Next(Retraining):
        def train(self, table, *, directory_out, **asked):
            super().train(table, directory_out=directory_out, **asked)
            given[0].mkdir(parents=True, exist_ok=True)
            save_file(moved(0.5), given[0] / "model.safetensors")
            given.append(Path(directory_out))
            assert weights_sha256(given[1]) == self.sha256

    with pytest.raises(LearnerLost):
        recover(context, Lost(0.0))
    recover(context, Next(0.0))
    assert len(given) == 2 and not given[1].exists(), "what is trained again is thrown away"
    context.store.policies.discard(context.store.policies.scratch("next"))
    assert not given[0].exists(), "and what came late is swept"


@pytest.mark.parametrize(("own", "ranks"), [({}, 1), ({"processes": 3}, 3), ({"processes": 2, "nodes": 2}, 4)])
def test_state_that_was_kept_is_that_of_all_ranks_or_none(context, tmp_path, own, ranks):
    loaded = []

    class Keeping(Retraining):
        def load(self, policy_key, directory, fresh_optimizer, **named):
            loaded.append(named.pop("state_directory", ""))
            super().load(policy_key, directory, True, **named)

    kept = tmp_path / "kept"
    kept.mkdir()
    for rank in range(ranks):
        recover(context, Keeping(0.0), "cpu", own, str(kept))
        assert loaded.pop() == "" and not loaded, "the state of a rank is not there, so the batch is trained again"
        (kept / state_file("second", rank, ranks)).touch()
    recover(context, Keeping(0.0), "cpu", own, str(kept))
    assert loaded == [str(kept)]


def test_without_recorded_weights_nothing_can_be_compared(context):
    context.store.policies.remove("second", "a test")
    with pytest.raises(WeightsDiffer):
        recover(context, Retraining(MAX_DIFFERENCE / 2), "cuda")


def test_other_tensors_are_infinitely_far(tmp_path):
    for name, arrays in (("a", WEIGHTS), ("b", {"a": WEIGHTS["a"]}), ("c", {**WEIGHTS, "b": WEIGHTS["b"][:4]})):
        (tmp_path / name).mkdir()
        save_file(arrays, tmp_path / name / "model.safetensors")
    assert relative_difference(tmp_path / "a", tmp_path / "a") == 0
    assert relative_difference(tmp_path / "b", tmp_path / "a") == relative_difference(tmp_path / "c", tmp_path / "a")
    assert relative_difference(tmp_path / "b", tmp_path / "a") == float("inf")
