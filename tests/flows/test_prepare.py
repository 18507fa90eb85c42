"""Preparation: what a new run, a resumed one and a wrong request come to, with nothing started."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.run import RunConfig
from flows.prepare import prepare
from storage.store import open_store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that says of itself what preparation reads of a model."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 300, "max_position_embeddings": 4096}))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def prepared(tmp_path: Path, *overrides: str, **settings: Any) -> RunConfig:
    store = str(tmp_path / "store")
    return prepare("train", settings.pop("files", ["demo"]), overrides, **{"store": store, **settings})


def record(config: RunConfig) -> None:
    open_store(config.store).runs.record(
        run=config.name, event="started", kind=config.kind, config=config.model_dump(mode="json")
    )


def test_what_is_left_open_is_filled_in(tmp_path: Path, model: Path) -> None:
    config = prepared(tmp_path, f"model.path={model}")
    assert config.seed is not None and config.name.startswith("train-")
    assert config.model.vocab_size == 300 and config.model.renderer == "qwen3"
    assert config.engine.version.startswith("vllm") and config.environments[0].version


def test_two_new_runs_take_two_seeds_unless_one_is_given(tmp_path: Path, model: Path) -> None:
    seeds = {prepared(tmp_path, f"model.path={model}").seed for _ in range(3)}
    given = {prepared(tmp_path, f"model.path={model}", seed=5).seed for _ in range(3)}
    assert len(seeds) > 1 and given == {5}


def test_a_recorded_run_goes_on_with_its_own_config(tmp_path: Path, model: Path) -> None:
    first = prepared(tmp_path, f"model.path={model}", "training.learning_rate=1e-4", name="a")
    record(first)
    assert prepared(tmp_path, files=(), name="a") == first
    assert prepared(tmp_path, files=(), name="a", steps=50) == first.model_copy(update={"steps": 50})


def test_the_same_request_under_the_same_name_resumes(tmp_path: Path, model: Path) -> None:
    asked = (f"model.path={model}", "training.learning_rate=1e-4")
    first = prepared(tmp_path, *asked, name="a")
    record(first)
    assert prepared(tmp_path, *asked, name="a").seed == first.seed


def test_another_config_under_the_same_name_is_refused(tmp_path: Path, model: Path) -> None:
    record(prepared(tmp_path, f"model.path={model}", name="a"))
    with pytest.raises(ConfigError, match=r"training.learning_rate: 0.0003 is recorded, 0.5 is asked for[^$]*--name"):
        prepared(tmp_path, f"model.path={model}", "training.learning_rate=0.5", name="a")


def test_operational_settings_may_change_on_resume(tmp_path: Path, model: Path) -> None:
    record(prepared(tmp_path, f"model.path={model}", name="a"))
    assert prepared(tmp_path, "engine.threads=2", files=(), name="a").engine.threads == 2


def test_a_missing_model_is_said_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: there is no directory"):
        prepared(tmp_path, f"model.path={tmp_path}/absent")


@pytest.mark.parametrize("renderer", ["qwen33", ""])
def test_a_renderer_that_is_not_known_is_refused(tmp_path: Path, model: Path, renderer: str) -> None:
    with pytest.raises(ValueError, match=r"renderer") as caught:
        prepared(tmp_path, f"model.path={model}", f'model.renderer="{renderer}"')
    assert "Nothing was started" in "".join(getattr(caught.value, "__notes__", []))
