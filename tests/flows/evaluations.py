"""Whole runs in this process that are evaluated: rollouts of an example get better with the policy's version."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs.run import View
from flows.runtime import evaluation as evaluating
from flows.runtime import loops as walks
from flows.runtime.session import Session, record_run
from storage.schemas.stage_tables import EXAMPLES
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.stage import Policy, Tables
from tests.builders import example, table, trace
from tests.crash import fixed
from tests.flows import rehearsal
from tests.waiting import PATIENCE

HELD_OUT = 6
FIRST = 0.1
"""The share of the reward that the first policy earns; each later one earns as much more."""


def examples(tables: Tables, view: View) -> Tables:
    """Stand in for the environment: its examples, and held-out ones of tiers 0, 1 and 2 in turn."""
    rows = [
        example(f"held-{number}", fixed.ENVIRONMENT, "eval") | {"task": json.dumps({"tier": number % 3})}
        for number in range(HELD_OUT)
    ]
    return {"examples": pa.concat_tables([fixed.examples(), pa.Table.from_pylist(rows, schema=EXAMPLES.arrow)])}


class Sampler:
    """Stands in for sampling, of held-out examples too; says who it sampled with, and fails where it is told to."""

    def __init__(self, failing: frozenset[str] = frozenset()) -> None:
        self.failing = set(failing)
        """Assignments whose rollout ends with an error."""
        self.evaluated: list[int] = []
        """The version of each policy that was evaluated, in order."""
        self.threads: set[str] = set()
        self.gate: threading.Event | None = None
        """What an evaluation waits for, where one is set."""

    def __call__(self, tables: Tables, config: View, *, step: int, policy: Policy) -> Tables:
        rows = tables["assignments"].to_pylist()
        if not rows[0]["group_id"].startswith("eval-"):
            return rehearsal.sampled(tables, config, step=step, policy=policy)
        self.evaluated.append(policy.version)
        self.threads.add(threading.current_thread().name.split("_")[0])
        assert self.gate is None or self.gate.wait(PATIENCE), "the run waited for the evaluation"
        return {
            "traces": table("traces", [self._trace(row, policy) for row in rows]),
            "messages": table("messages", []),
        }

    def _trace(self, row: dict[str, Any], policy: Policy) -> dict[str, Any]:
        names = ("assignment_id", "group_id", "environment", "example_id")
        reward = min(1.0, FIRST * (1 + policy.version) + 0.01 * (row["member"] + int(row["example_id"][-1])))
        failed = row["assignment_id"] in self.failing
        error = {"reward": None, "error_class": "infrastructure", "error_type": "E", "error_message": "gone"}
        common = {name: row[name] for name in names} | {"policy_key": policy.key, "policy_version": policy.version}
        common |= {"reward": reward} | (error if failed else {})
        return trace(f"{row['seed']:x}-{policy.version}", **common)


@contextmanager
def played(sampler: Sampler) -> Iterator[None]:
    """Within the block, the walks of flows do their work as a rehearsal does."""

    class Evaluating(rehearsal.Rehearsal):
        def __call__(self, task: StageTask, *arguments: Any, **named: Any) -> Any:
            own = {"examples": examples, "rollout": sampler}
            stage = rehearsal.STAND_INS.get(task.stage.name, task.stage)
            if stage.name in own:
                stage = replace(stage, function=own[stage.name])
            return super(rehearsal.Rehearsal, self).__call__(rehearsal.Played(stage), *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walks, "Executor", Evaluating)
        patch.setattr(evaluating, "Executor", Evaluating)
        yield


def train(root: Path, name: str, sampler: Sampler, **changes: Any) -> tuple[Session, dict[str, Any]]:
    """Walk a training run with evaluations; return its session and its outcome."""
    session = rehearsal.session_for(root, name, **changes)
    with played(sampler), record_run(session):
        return session, walks.loop_train(session)


def evaluate(root: Path, name: str, sampler: Sampler, **changes: Any) -> tuple[Session, dict[str, Any]]:
    """Walk an evaluation of the first weights; return its session and its outcome."""
    session = rehearsal.session_for(root, name, kind="evaluate", **changes)
    with played(sampler), record_run(session):
        return session, walks.loop_evaluate(session)
