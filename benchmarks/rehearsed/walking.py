"""A whole run in this process: the real pipeline, store and table stages, with stand-ins for what needs an engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.rehearsed.learning import imported, trained
from benchmarks.rehearsed.rollouts import Sampling, rollouts
from benchmarks.rehearsed.shapes import TEXT_ENVIRONMENT, TOOL_ENVIRONMENT, Shape
from configs.run import RunConfig, View
from flows.queries.step_history import step_history
from flows.replays.steps import replay_steps
from flows.runtime import pipeline
from flows.runtime.executor import Executor
from flows.runtime.loops import evaluation_contexts
from flows.runtime.prepare import Source
from flows.runtime.session import Session, record_run
from flows.services.base import Supervisor
from storage.schemas.stage_tables import EXAMPLES
from storage.store import Store, open_store
from tasks.runtime.execute import Parts
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref, Tables
from tests.fixtures.rehearsal import Played

SOURCE = Source("weights", "digest of the weights")
EXAMPLES_OF_EACH = 300
"""Examples of an environment: few enough for a long run to try each of them many times."""
PARTS = 4
"""Commits of a step's rollouts."""


class Player(Executor):
    """Does stages as in a run, where it is called; what would need an engine, a learner or a server is made up."""

    def __init__(
        self, session: Session, context: RunContext | None = None, shape: Shape | None = None, rest: float = 0.0
    ):
        """`shape` is the course that every rollout takes; None lets them differ. `rest` is seconds between parts."""
        super().__init__(session, context)
        self._stand_ins: dict[str, Callable[..., Tables]] = {
            "policy_import": imported,
            "examples": _examples,
            "rollout": _sampler(shape, rest),
            "training": trained,
        }

    def __call__(self, task: StageTask, *arguments: Any, **named: Any) -> Ref:
        stage = task.stage
        if stage.name in self._stand_ins:
            stage = replace(stage, function=self._stand_ins[stage.name])
        return super().__call__(Played(stage), *arguments, **named)


def walk(config: RunConfig, shape: Shape | None = None, rest: float = 0.0) -> Iterator[int]:
    """Train in the store that the config names, and yield each step when it is finished."""
    session = _session(config)
    with record_run(session):
        do = Player(session, shape=shape, rest=rest)
        _evaluate(session, pipeline.first_policy(do, SOURCE))
        for finished in pipeline.run_steps(do, SOURCE):
            _evaluate(session, finished.policy)
            yield finished.step


def replay(config: RunConfig) -> Iterator[int]:
    """Go through recorded steps again as the config's section `replay` says, and yield each when it is finished."""
    session = _session(config)
    with record_run(session):
        found = step_history(session.context.store, config.replay.run)
        for done in replay_steps(Player(session), SOURCE, config, found):
            yield done.step


def _session(config: RunConfig) -> Session:
    store: Store = open_store(config.store)
    session = Session(RunContext(store, config.name, config, {}), SOURCE, Supervisor(config.name, _logs(store)))
    return session


def _evaluate(session: Session, policy: Policy) -> None:
    for context in evaluation_contexts(session.context).values():
        if context.config.evaluation.due(policy.version):
            pipeline.evaluate(Player(session, context), policy)


def _examples(tables: Tables, config: View) -> Tables:
    rows = [
        {
            "environment": environment,
            "example_id": f"{environment} {number}",
            "split": "eval" if number % 8 == 0 else "train",
            "task": f'{{"prompt": "{environment} {number}", "idx": {number}}}',
        }
        for environment in (TOOL_ENVIRONMENT, TEXT_ENVIRONMENT)
        for number in range(EXAMPLES_OF_EACH)
    ]
    return {"examples": pa.Table.from_pylist(rows, schema=EXAMPLES.arrow)}


def _sampler(shape: Shape | None, rest: float) -> Callable[..., Tables]:
    """Return what stands in for sampling; it hands over whole groups, and waits until they are committed."""

    def sample(tables: Tables, config: View, *, step: int, policy: Policy, parts: Parts) -> Tables:
        tokens = parts.tokens
        for rows in _portions(tables["assignments"].to_pylist()):
            made = rollouts(rows, Sampling(policy, step, shape))
            parts.put(made)
            counts = made["traces"].select(["num_input_tokens", "num_output_tokens"]).to_pylist()
            tokens += sum(sum(each.values()) for each in counts)
            while parts.tokens < tokens:
                parts.finished_units()  # raises what a commit raised
                time.sleep(0.002)
            time.sleep(rest)
        return {}

    return sample


def _portions(rows: list[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    """Yield the rows of a quarter of the groups at a time."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    members = list(groups.values())
    size = -(-len(members) // PARTS)
    for first in range(0, len(members), size):
        yield [row for group in members[first : first + size] for row in group]


def _logs(store: Store) -> Path:
    assert store.root.directory is not None, "a store for looking at is on this disk"
    return store.root.directory.parent / "logs"
