"""Rollouts of an environment by the small engine, through a real server: the rows that sampling hands over."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from configs.environments import EnvironmentConfig
from configs.run import View
from tasks.inference.engine.client import Engine
from tasks.inference.environments import servers as environments
from tasks.inference.sampling import rollouts
from tests.tasks.inference.hosts import KEY, assigned, served

Rows = list[dict[str, Any]]


def sampled(
    engine: Engine,
    environment: EnvironmentConfig,
    view: Callable[..., View],
    directory: Path,
    num_examples: int = 1,
    group_size: int = 2,
    **rollout: Any,
) -> tuple[Rows, Rows]:
    """The traces and messages of groups of the first examples, served from `directory`."""
    examples = environments.examples(environment)
    shape = (num_examples, group_size)
    tables = sampled_tables(engine, environment, view(environment, **rollout), examples, directory, shape)
    return tables["traces"].to_pylist(), tables["messages"].to_pylist()


def sampled_tables(
    engine: Engine,
    environment: EnvironmentConfig,
    config: View,
    examples: pa.Table,
    directory: Path,
    shape: tuple[int, int],
    policy_key: str = "policy",
) -> dict[str, pa.Table]:
    """The same as tables, for a config as it is; `shape` is how many of the examples, and the size of their groups."""
    groups: list[dict[str, pa.Table]] = []
    num_examples, group_size = shape
    ids = examples["example_id"].to_pylist()[:num_examples]
    with served(environment, directory) as told:
        assert "address" in told, told
        rollouts.sample(
            assigned(environment.name, ids, group_size),
            examples,
            engine_url=engine.url,
            api_key=KEY,
            addresses={environment.name: told["address"]},
            policy={"key": policy_key, "version": 0},
            step=0,
            config=config,
            on_group=lambda _, tables: groups.append(tables),
        )
    return {name: pa.concat_tables([each[name] for each in groups]) for name in ("traces", "messages")}


def own(trace: dict[str, Any], messages: Rows) -> Rows:
    """The messages of a trace."""
    return [row for row in messages if row["trace_id"] == trace["trace_id"]]


def failures(traces: Rows) -> list[Any]:
    """What went wrong, to be read where nothing should have."""
    return [(row["agent"], row["error_type"], row["error_message"]) for row in traces if row["error_class"]]
