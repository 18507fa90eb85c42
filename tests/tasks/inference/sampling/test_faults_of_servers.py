"""Environments that take their server down: it is started again, and every rollout is accounted for.

Real servers below a real supervisor, the small engine, and the rollout stage as a run has it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.algorithms import TeacherConfig
from configs.run import RunConfig, View
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from flows.services.ownership import identity, owned
from tasks.inference.engine.client import MODEL, Engine, ServedModel
from tasks.inference.environments import servers as environments
from tasks.rollout.stage import STAGE, rollout
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import KEY, PLUGINS, assigned

pytestmark = pytest.mark.engine


class Handed:
    """The groups that were handed over, in memory."""

    def __init__(self) -> None:
        self.traces: dict[str, list[dict[str, Any]]] = {}

    def finished_units(self) -> set[str]:
        return set(self.traces)

    def put(self, tables: dict[str, pa.Table]) -> None:
        rows = tables["traces"].to_pylist()
        assert rows[0]["group_id"] not in self.traces, "a group is handed over once"
        self.traces[rows[0]["group_id"]] = rows


class OneEngine:
    """The service of an engine that somebody else keeps at its policy."""

    def __init__(self, engine: Engine) -> None:
        self.served = ServedModel(engine.url, KEY, MODEL, "policy")

    def serve(self, policy: Policy) -> ServedModel:
        return self.served

    @contextmanager
    def pinned(self, policy: Policy) -> Iterator[ServedModel]:
        yield self.served


class NoTeachers:
    """The service of teachers of a run that has none."""

    def serve(self, teacher: TeacherConfig) -> ServedModel:
        raise AssertionError("nobody is taught")


def test_rollouts_of_a_lost_server_are_sampled_again(
    small_engine: Engine, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rollout blocks the server's event loop, one calls `sys.exit`, each the first time that it is scored."""
    faults = ("blocks", "leaves")
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    names = ["fine", *faults]
    taskset = {"id": "misbehaving_taskset", "faults": names, "task": {"directory": str(tmp_path)}}
    config = RunConfig.model_validate(
        {
            "model": {"path": str(models["a"]), "renderer": "qwen3"},
            "environments": [{"name": "bad", "taskset": taskset, "hang_seconds": 10.0}],
            "rollout": {"max_tokens": 4, "max_attempts": 1},
        }
    )
    handed: Any = Handed()
    with Supervisor("run", tmp_path / "services") as supervisor:
        servers = EnvironmentServers(supervisor, config, KEY)
        tables = {"assignments": assigned("bad", names, 2), "examples": environments.examples(config.environments[0])}
        rollout(
            tables,
            View(config, STAGE.sections, "rollout"),
            step=1,
            policy=Policy("policy-of-losses", 0),
            parts=handed,
            engine=OneEngine(small_engine),
            environments=servers,
            teachers=NoTeachers(),
        )
        generation = servers._handles["bad"].generation
    assert owned(identity()) == []
    rows = [row for group in handed.traces.values() for row in group]
    assert sorted(row["assignment_id"] for row in rows) == sorted(
        f"{name}/{member}" for name in names for member in (0, 1)
    )
    assert {(row["error_class"], row["reward"]) for row in rows} == {(None, 0.5)}
    log = (tmp_path / "services" / "environment-bad.log").read_text()
    assert all((tmp_path / f"{fault}.once").exists() for fault in faults)
    assert "the one before did not answer any more and was ended" in log
    # The exit is there as Python says it: taking a process apart may last until it counts as hanging.
    assert generation == 2 or "\nplanted\n" in log
