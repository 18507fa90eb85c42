"""Weights within bounds: which policies keep theirs while a run goes on, and how much disk the run is said to need."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from configs.load import load
from configs.run import RunConfig
from configs.training import TrainingConfig
from flows.runtime.policy_retention import (
    MIN_FREE_BYTES,
    WeightRetention,
    file_bytes,
    kept_versions,
    most_bytes,
    require_space,
)
from storage.errors import NoSpace, PolicyAbsent
from storage.store import Store, open_store
from tasks.runtime.stage import Policy
from tests.fixtures.histories import evaluate, train


def config(*overrides: str) -> RunConfig:
    return load(["demo"], [*overrides])


def retention_of(store: Store, run: str, *overrides: str) -> WeightRetention:
    context: Any = SimpleNamespace(run=run, store=store, config=config(*overrides), flush=lambda: None)
    return WeightRetention(context)


def names(numbers: Sequence[int]) -> list[str]:
    return [f"training-{'x' * number}" for number in numbers]


def note_all(retention: WeightRetention, last: int, **named: Any) -> list[str]:
    """Let a run come to `last` policies, made before."""
    gone = []
    for number in range(1, last + 1):
        gone += retention.note(Policy(f"training-{'x' * number}", number), **named)
    return gone


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
    kept: set[int] = set()
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


def test_weights_go_as_the_run_goes_on(tmp_path):
    store = open_store(tmp_path)
    train(store, "a", "xxxxxx", finished=False)  # versions 1 to 6
    gone = note_all(retention_of(store, "a", "training.keep_weights=last:2", "training.save_optimizer_every=3"), 6)
    assert gone == names([1, 2, 3, 4])  # 3 stays until 6 has optimizer state as well
    assert [store.policies.find(name) is not None for name in names(range(1, 7))] == [*[False] * 4, True, True]
    with pytest.raises(PolicyAbsent, match="keep_weights = 'last:2'"):
        store.policies.directory("training-x")


def test_what_others_use_and_what_is_needed_stays(tmp_path):
    store = open_store(tmp_path)
    train(store, "a", "xxxxx", finished=False)
    evaluate(store, "tried", "training-xx")
    retention = retention_of(store, "a", "training.keep_weights=last")
    assert note_all(retention, 4, needed={"training-x"}) == ["training-xxx"]
    assert retention.note(Policy("training-xxxxx", 5)) == ["training-x", "training-xxxx"]  # needed no more
    assert store.policies.find("training-xx")


def test_a_run_that_is_gone_through_again_removes_nothing_more(tmp_path):
    store = open_store(tmp_path)
    train(store, "a", "xxxx", finished=False)
    settings = ("training.keep_weights=last:2,every:3", "training.save_optimizer_every=2")
    note_all(retention_of(store, "a", *settings), 4)
    before = store.policies.names()
    note_all(retention_of(store, "a", *settings), 4)
    assert store.policies.names() == before == names([3, 4])


def test_the_ledger_comes_first(tmp_path):
    """Nothing goes before what replaces it is in the ledger: a run killed in between would have neither."""
    store = open_store(tmp_path)
    train(store, "a", "xx", finished=False)
    retention = retention_of(store, "a", "training.keep_weights=last")
    there: list[bool] = []
    retention._context.flush = lambda: there.append(store.policies.find("training-x") is not None)  # type: ignore[method-assign]
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
    import torch
    from safetensors.torch import save_file

    model = tmp_path / "model"
    model.mkdir()
    save_file({"a": torch.zeros(10, 100), "b": torch.zeros(24)}, model / "model.safetensors")
    store = open_store(tmp_path / "store")
    needed = MIN_FREE_BYTES + file_bytes(model) + most_bytes(settings := config("steps=50"), 1024)
    monkeypatch.setattr("flows.runtime.policy_retention.shutil.disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(NoSpace, match=r"it will need up to") as refused:
        require_space(store, settings, model)
    assert "training.keep_weights=last:3" in str(refused.value)
    require_space(store, config("steps=50", "training.keep_weights=last"), model)
    monkeypatch.setattr("flows.runtime.policy_retention.shutil.disk_usage", lambda _: SimpleNamespace(free=needed))
    require_space(store, settings, model)


def test_a_hundred_steps_of_the_gpu_preset_have_room_on_a_small_disk():
    """Qwen3-0.6B has 596,049,920 parameters."""
    preset = load(["qwen3_gpu"])
    assert preset.steps == 100
    first = 2 * 596_049_920
    assert first + most_bytes(preset, 596_049_920) < 20e9
    assert first + most_bytes(load(["qwen3_gpu"], ["training.keep_weights=all"]), 596_049_920) > 180e9
