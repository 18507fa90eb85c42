"""A rollout that takes its environment server down every time: one row, and everybody else has theirs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from configs.environments import EnvironmentConfig
from configs.run import RunConfig, View
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from flows.services.ownership import identity, owned
from tasks.inference.engine.client import MODEL, Engine, ServedModel
from tasks.inference.environments import servers as environments
from tasks.rollout.stage import STAGE, rollout
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import ENGINE, KEY, PLUGINS, assigned

pytestmark = pytest.mark.engine

NAMES = ["fine 1", "dies 1", "fine b 1"]
DEADLY = EnvironmentConfig(name="deadly", taskset={"id": "counted_taskset", "names": NAMES})


class PinnedEngine:
    """The engine, which stays where it is."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def pinned(self, policy: Policy) -> Iterator[ServedModel]:
        yield ServedModel(self.engine.url, KEY, MODEL, policy.key)


class Kept:
    """Parts in memory."""

    def __init__(self) -> None:
        self.traces: list[dict] = []

    def put(self, tables: dict[str, pa.Table]) -> None:
        self.traces += tables["traces"].to_pylist()

    def finished_units(self) -> set[str]:
        return {row["group_id"] for row in self.traces}


def test_a_killer_is_one_row_and_costs_the_others_nothing(
    small_engine: Engine, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    config = RunConfig.model_validate(
        {
            "environments": (DEADLY,),
            "rollout": {"max_tokens": 4, "max_attempts": 2, "timeout_seconds": 240.0},
            "engine": ENGINE,
            "model": {"path": str(models["a"]), "renderer": "qwen3"},
        }
    )
    rows = assigned("deadly", NAMES, 2)
    rows = rows.filter(pa.array([name != "dies 1/1" for name in rows["assignment_id"].to_pylist()]))
    kept = Kept()
    with Supervisor("killers", tmp_path / "services") as supervisor:
        rollout(
            {"assignments": rows, "examples": environments.examples(DEADLY)},
            View(config, STAGE.sections, "rollout"),
            step=0,
            policy=Policy("the policy", 0),
            parts=kept,  # type: ignore[arg-type]
            engine=PinnedEngine(small_engine),  # type: ignore[arg-type]
            environments=EnvironmentServers(supervisor, config, KEY),
            teachers=SimpleNamespace(serve=None),  # type: ignore[arg-type]
        )
    assert {row["assignment_id"]: row["error_class"] for row in kept.traces} == {
        "fine 1/0": None,
        "fine 1/1": None,
        "dies 1/0": "infrastructure",
        "fine b 1/0": None,
        "fine b 1/1": None,
    }
    (killer,) = (row for row in kept.traces if row["error_class"])
    assert killer["error_type"] == "ServerLost"
    assert "environment server 'deadly' died while this rollout alone was under way" in killer["error_message"]
    assert owned(identity()) == []
