"""Regrading what a real engine and a real environment server made: unchanged functions give the recorded scores."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.environments import EnvironmentConfig
from configs.run import View
from tasks.inference.engine.client import Engine
from tasks.inference.environments import servers as environments
from tests.fixtures.hosts import assigned, served
from tests.fixtures.sampled import sample

pytestmark = pytest.mark.engine


@pytest.mark.usefixtures("plugins")
def test_real_rollouts_of_several_turns_are_scored_as_they_were(
    small_engine: Engine, view: Callable[..., View], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verifiers.v1.judge import Judge

    from tasks.inference.grading.host import Grader

    environment = EnvironmentConfig(name="two", taskset={"id": "two_turns"})
    examples = environments.examples(environment)
    rows: dict[str, list[dict[str, object]]] = {"traces": [], "messages": []}
    with served(environment, tmp_path) as told:
        rows_of = assigned("two", ["t0", "t1"], 2)
        for tables in sample(small_engine.url, told["address"], view(environment), rows_of, examples).values():
            for name in rows:
                rows[name].extend(tables[name].to_pylist())
    assert [row["reward"] for row in rows["traces"]] == [2.0] * 4, "the server is gone, the rollouts are recorded"
    monkeypatch.setattr(Judge, "complete", Judge.complete)  # a grader forbids it in its whole process
    grader = Grader(environment.model_dump(mode="json"))
    found = asyncio.run(grader.score(examples.to_pylist(), rows["traces"], rows["messages"]))
    same = ("trace_id", "reward", "rewards", "metrics", "info", "error_class")
    assert [[row[name] for name in same] for row in found] == [[row[name] for name in same] for row in rows["traces"]]
