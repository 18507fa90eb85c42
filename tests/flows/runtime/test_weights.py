"""Weights within bounds: which policies keep theirs while a run goes on, and how much disk the run is said to need."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.numpy import save_file

from configs.load import load
from configs.training import TrainingConfig
from flows.runtime.policy_retention import (
    MIN_FREE_BYTES,
    WeightRetention,
    kept_versions,
    most_bytes,
    require_space,
)
from storage.errors import NoSpace, PolicyAbsent
from storage.store import open_store
from tasks.runtime.stage import Policy
from tests.fixtures.histories import evaluate, train


def config(*overrides):
    return load(["demo"], [*overrides])


def retention_of(store, run, *overrides):
    context = SimpleNamespace(run=run, store=store, config=config(*overrides), flush=lambda: None)
    return WeightRetention(context)


def names(numbers):
    return [f"training-{'x' * number}" for number in numbers]


def note_all(retention, last, **named):
    """Let a run come to `last` policies, made before."""
    policies = map(Policy, names(range(1, last + 1)), range(1, last + 1))
    return [gone for policy in policies for gone in retention.note(policy, **named)]


@pytest.fixture
def store(tmp_path):
    """A store in which run `a` has made six policies."""
    store = open_store(tmp_path)
    train(store, "a", "xxxxxx", finished=False)
    return store


@given(
    last=st.integers(1, 4),
    every=st.none() | st.integers(1, 5),
    saved=st.integers(1, 5),
    steps=st.integers(1, 25),
    overlap=st.booleans(),
)
def test_what_is_kept_is_what_the_definition_says(last, every, saved, steps, overlap):
    text = f"last:{last}" + (f",every:{every}" if every else "")
    settings = config(
        f"training.keep_weights={text}",
        f"training.save_optimizer_every={saved}",
        f"rollout.max_off_policy_steps={int(overlap)}",
    )
    kept = set()
    for version in range(1, steps + 1):
        kept = kept_versions(settings, {*kept, version})
    for version in range(1, steps + 1):
        with_state = version % saved == 0 and not any(later % saved == 0 for later in range(version + 1, steps + 1))
        new = version > steps - max(last, 1 + overlap)
        assert (version in kept) == (new or with_state or (every is not None and version % every == 0))


def test_all_is_the_default_and_keeps_all():
    assert kept_versions(config(), range(1, 8)) == set(range(1, 8))


@pytest.mark.parametrize("text", ["", "none", "last:0", "every", "last:2,", "last:-1", "last:2;every:3", "last:1e9"])
def test_what_cannot_be_meant_is_refused(text):
    with pytest.raises(ValidationError, match="keep_weights"):
        TrainingConfig(keep_weights=text)


def test_weights_go_as_the_run_goes_on(store):
    gone = note_all(retention_of(store, "a", "training.keep_weights=last:2", "training.save_optimizer_every=3"), 6)
    assert gone == names([1, 2, 3, 4])  # 3 stays until 6 has optimizer state as well
    assert [store.policies.find(name) is not None for name in names(range(1, 7))] == [*[False] * 4, True, True]
    with pytest.raises(PolicyAbsent, match="keep_weights = 'last:2'"):
        store.policies.directory("training-x")


def test_what_others_use_and_what_is_needed_stays(store):
    evaluate(store, "tried", "training-xx")
    retention = retention_of(store, "a", "training.keep_weights=last")
    assert note_all(retention, 4, needed={"training-x"}) == ["training-xxx"]
    assert retention.note(Policy("training-xxxxx", 5)) == ["training-x", "training-xxxx"]  # needed no more
    assert store.policies.find("training-xx")


def test_a_run_that_is_gone_through_again_removes_nothing_more(store):
    settings = ("training.keep_weights=last:2,every:3", "training.save_optimizer_every=2")
    for _ in range(2):
        note_all(retention_of(store, "a", *settings), 6)
        assert store.policies.names() == names([3, 5, 6])


def test_the_ledger_comes_first(store):
    """Nothing goes before what replaces it is in the ledger: a run killed in between would have neither."""
    retention = retention_of(store, "a", "training.keep_weights=last")
    there = []
    retention._context.flush = lambda: there.append(store.policies.find("training-x") is not None)
    note_all(retention, 2)
    assert there == [True] and store.policies.find("training-x") is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # 4 bytes a parameter each, 12 with optimizer state; rounded 2, and 14 with the weights behind them.
        ((), 5 * 12),
        (("training.save_optimizer_every=5",), 4 * 4 + 12),
        (("training.keep_weights=last", "training.save_optimizer_every=5"), 4 + 12),
        (("training.keep_weights=last",), 2 * 12),
        (("training.save_optimizer_every=5", "training.policy_dtype=bfloat16", "training.dtype=bfloat16"), 4 * 2 + 14),
    ],
)
def test_the_most_that_weights_take(overrides, expected):
    assert most_bytes(config("steps=5", *overrides), 10**6) == expected * 10**6


def test_a_run_without_room_for_its_weights_is_refused(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    save_file({"a": np.zeros((10, 100), np.float32), "b": np.zeros(24, np.float32)}, model / "model.safetensors")
    store = open_store(tmp_path / "store")
    settings, num_parameters = config("steps=50"), 1024
    needed = MIN_FREE_BYTES + (model / "model.safetensors").stat().st_size + 50 * 12 * num_parameters
    disk = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr("flows.runtime.policy_retention.shutil.disk_usage", lambda _: disk)
    with pytest.raises(NoSpace, match=r"it will need up to") as refused:
        require_space(store, settings, model)
    assert "training.keep_weights=last:3" in str(refused.value)
    require_space(store, config("steps=50", "training.keep_weights=last"), model)
    disk.free = needed
    require_space(store, settings, model)


def test_a_hundred_steps_of_the_gpu_preset_have_room_on_a_small_disk():
    """Qwen3-0.6B has 596,049,920 parameters."""
    preset, parameters = load(["qwen3_gpu"]), 596_049_920
    assert preset.steps == 100
    assert 2 * parameters + most_bytes(preset, parameters) < 20e9
    assert 2 * parameters + most_bytes(load(["qwen3_gpu"], ["training.keep_weights=all"]), parameters) > 180e9
