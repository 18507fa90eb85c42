"""Fixtures of the room for sampling."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.run import View
from tasks.inference.engine.client import Engine
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.hosts import PLUGINS, engine_of, view_of


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

    return lambda environment, **rollout: view_of(models["a"], environment, **rollout)
