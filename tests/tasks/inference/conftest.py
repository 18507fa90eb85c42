"""Fixtures of the room for sampling."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.run import RunConfig, View
from configs.sections import EnvironmentConfig, ModelConfig, RolloutConfig
from tasks.inference.engine import Engine
from tasks.learner.tiny import tiny_qwen3
from tests.tasks.inference.hosts import ENGINE, engine_of

PLUGINS = Path(__file__).parent / "plugins"
SECTIONS = ("rollout", "environments", "engine", "model")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models: a and b differ in every weight; tied and tied_b share their heads with their embeddings."""
    root = tmp_path_factory.mktemp("models")
    return {
        "a": tiny_qwen3(root / "a", seed=1),
        "b": tiny_qwen3(root / "b", seed=2),
        "tied": tiny_qwen3(root / "tied", seed=3, tied=True),
        "tied_b": tiny_qwen3(root / "tied_b", seed=4, tied=True),
    }


@pytest.fixture(scope="session")
def small_engine(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for all tests that leave it alive."""
    with engine_of(models["a"], tmp_path_factory.mktemp("engine") / "report.json") as client:
        yield client


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tests' own tasksets importable, here and in the processes that are started."""
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))


@pytest.fixture
def view(models: dict[str, Path]) -> Callable[..., View]:
    """Builds the config view of a rollout stage."""

    def build(environment: EnvironmentConfig, **rollout: Any) -> View:
        config = RunConfig(
            model=ModelConfig(path=str(models["a"]), renderer="qwen3"),
            environments=(environment,),
            rollout=RolloutConfig(**{"max_tokens": 12, **rollout}),
            engine=ENGINE,
        )
        return View(config, SECTIONS, "rollout")

    return build
