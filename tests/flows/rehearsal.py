"""A whole run in this process, without engines: fixed rollouts, and rows that say what a learner might have measured.

The walk, the keys, the ledger, the tables and every stage between sampling and training are the real ones.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from configs.run import RunConfig, View
from flows.runtime import pipeline
from flows.runtime.executor import Executor
from flows.runtime.pipeline import Source
from flows.runtime.session import Session, record_run
from flows.services.base import Supervisor
from storage.keys import content_key
from storage.schemas.learner_tables import UPDATES
from storage.store import Store, open_store
from tasks.assignment import examples as listing
from tasks.gate.stage import Answer, Approve, Question
from tasks.rollout import stage as rollout
from tasks.runtime.execute import perform
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy, Ref, Stage, Tables
from tasks.training import policy as policy_import
from tasks.training import stage as training
from tests.builders import table
from tests.crash import fixed

SOURCE = Source("weights", "digest of the weights")
SMALL: dict[str, Any] = {
    "seed": 7,
    "steps": 2,
    "environments": ({"name": fixed.ENVIRONMENT, "taskset": {"id": fixed.ENVIRONMENT}},),
    "assignment": {"groups_per_step": 3, "group_size": 4},
    "packing": {"tokens_per_row": 64},
    "model": {"vocab_size": 512},
}


def sampled(tables: Tables, config: View, *, step: int, policy: Policy) -> Tables:
    """Stand in for sampling: the rollouts are those of the assignments, whatever the policy."""
    groups = fixed.groups(tables["assignments"]).values()
    made = [fixed.group(members, {"key": policy.key, "version": policy.version}, step) for members in groups]
    return {name: pa.concat_tables([each[name] for each in made]) for name in ("traces", "messages")}


def trained(tables: Tables, config: View, *, step: int, key: str, policy: Policy) -> Tables:
    """Stand in for training: the loss is a tenth of the step, the gradient norm the number of rows."""
    row: dict[str, Any] = {
        name: 0 if pa.types.is_integer(UPDATES.arrow.field(name).type) else 0.0 for name in UPDATES.arrow.names
    }
    row |= {"version": step + 1, "policy_key_in": policy.key, "weights_sha256_in": content_key(policy.key)}
    row |= {"weights_sha256": content_key(key), "has_optimizer": True, "metrics": "{}"}
    row |= {"learning_rate": config.training.learning_rate, "loss": step / 10, "rl_loss": step / 10}
    row |= {"grad_norm": float(tables["batches"].num_rows), "num_rows": tables["batches"].num_rows}
    return {"updates": table("updates", [row])}


def nothing(tables: Tables, config: View, *, source: str) -> Tables:
    """Stand in for weights that are brought in: the work has a key, and no rows."""
    return {"updates": table("updates", [])}


STAND_INS: dict[str, Stage] = {
    "policy_import": replace(policy_import.STAGE, writes=("updates",), function=nothing),
    "examples": replace(listing.task.stage, function=lambda tables, view: {"examples": fixed.examples()}),
    "rollout": replace(rollout.task.stage, function=sampled),
    "training": replace(training.STAGE, writes=("updates",), function=trained),
}


class Played(StageTask):
    """A stage that is done where it is called."""

    def __call__(self, *arguments: Any) -> Ref:
        return perform(self.stage, *arguments)


class Rehearsal(Executor):
    """Does stages as in a run; what would need an engine or a learner is played."""

    def __call__(self, task: StageTask, *arguments: Any, **named: Any) -> Ref:
        return super().__call__(Played(STAND_INS.get(task.stage.name, task.stage)), *arguments, **named)


def nobody(question: Question) -> Answer:
    """Stand in for a person where none should be asked."""
    raise AssertionError(f"step {question.step}: nobody should be asked")


def session_for(root: Path, name: str, approve: Approve = nobody, **changes: Any) -> Session:
    """Return a session of the small run with changes, in which a person is played too; it starts nothing."""
    store = open_store(root)
    config = RunConfig.model_validate(SMALL | {"name": name, "store": str(root)} | changes)
    session = Session(RunContext(store, name, config, {}), SOURCE, Supervisor(name, root.parent / "logs"))
    session.services = replace(session.services, approve=approve)
    return session


def rehearse(
    root: Path,
    name: str,
    approve: Approve = nobody,
    watch: Callable[[Session], None] = lambda session: None,
    **changes: Any,
) -> Store:
    """Walk the small run with changes in the store at `root`, from where it stands; return the store."""
    session = session_for(root, name, approve, **changes)
    watch(session)
    with record_run(session):
        for _ in pipeline.run_steps(Rehearsal(session), SOURCE, session.config):
            pass
    return session.place.store
