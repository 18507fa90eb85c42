"""Real small engines and environment servers for the tests of this room, each behind a guardian of its own."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from configs.environments import EnvironmentConfig
from configs.lora import LoraConfig
from configs.run import RunConfig, View
from configs.sections import ModelConfig, RolloutConfig
from configs.services import EngineConfig
from flows.services.process import start_guarded
from storage.schemas.stage_tables import ASSIGNMENTS
from tasks.inference.engine import client as engine
from tasks.inference.engine.client import Engine
from tasks.inference.environments import servers as environments
from tests.waiting import until

KEY = "the-key-of-the-test-engine"
PLUGINS = Path(__file__).parent / "plugins"
ENGINE = EngineConfig(max_model_len=256, memory_gib=0.25)
SECTIONS = ("rollout", "environments", "engine", "model")


@contextmanager
def running(argv: list[str], variables: dict[str, str], report: Path) -> Iterator[dict[str, Any]]:
    """Run a host process until the block ends; yield its report. Nothing of it is left then, nor when we are killed."""
    log = report.with_suffix(".log")
    process, lifeline = start_guarded(argv, variables, log, "--- host", grace_seconds=20.0)
    try:
        until(lambda: report.exists() or process.poll() is not None, lambda: log.read_text()[-4000:])
        assert report.exists(), log.read_text()[-4000:]
        yield json.loads(report.read_text())
    finally:
        lifeline.close()
        process.wait()


@contextmanager
def engine_of(
    directory: Path,
    report: Path,
    config: EngineConfig = ENGINE,
    frozen: bool = False,
    lora: LoraConfig | None = None,
    metrics: bool = False,
) -> Iterator[Engine]:
    """A real engine that was started with the weights in `directory`."""
    argv, variables = engine.command(config, ModelConfig(), directory, report, lora, frozen=frozen, metrics=metrics)
    with running(argv, variables | {config.api_key_variable: KEY}, report) as told:
        client = Engine(told["url"], KEY)
        yield client
        client.close()


@contextmanager
def served(environment: EnvironmentConfig, directory: Path) -> Iterator[dict[str, Any]]:
    """A real environment server; yields its report."""
    argv, variables = environments.command(environment, directory / f"{environment.name}.json")
    with running(argv, variables, directory / f"{environment.name}.json") as told:
        yield told


def assigned(environment: str, example_ids: list[str], group_size: int) -> pa.Table:
    """Assignments of one group for each example."""
    rows = [
        {
            "assignment_id": f"{example}/{member}",
            "group_id": example,
            "member": member,
            "environment": environment,
            "example_id": example,
            "seed": 100 * number + member,
        }
        for number, example in enumerate(example_ids)
        for member in range(group_size)
    ]
    return pa.Table.from_pylist(rows, schema=ASSIGNMENTS.arrow)


def view_of(weights: Path, environment: EnvironmentConfig, **rollout: Any) -> View:
    """The config view of a rollout stage."""
    config = RunConfig(
        model=ModelConfig(path=str(weights), renderer="qwen3"),
        environments=(environment,),
        rollout=RolloutConfig(**{"max_tokens": 12, **rollout}),
        engine=ENGINE,
    )
    return View(config, SECTIONS, "rollout")
