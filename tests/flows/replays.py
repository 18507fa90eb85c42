"""Replays in this process over recorded runs without engines: asked for, foretold, walked, the learner played."""

from pathlib import Path
from typing import Any

from configs.run import RunConfig
from flows.queries.step_history import step_history
from flows.replays.config import prepare_replay
from flows.replays.report import PolicyDistance, finish_replayed
from flows.replays.request import ReplayRequest
from flows.replays.steps import quarantined_in, replay_steps
from flows.runtime.dry_run import plan_work
from flows.runtime.session import Session, record_run
from flows.services.base import Supervisor
from storage.store import Store, open_store
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref
from tests.flows.rehearsal import SOURCE, Rehearsal

RLOO = "algorithm.type=rloo"


def ask(root: Path, **asked: Any) -> RunConfig:
    return prepare_replay(ReplayRequest(**{"run": "base", "store": str(root), "until": "packing"} | asked))


def walk(config: RunConfig) -> tuple[Session, list[dict[str, Any]]]:
    """Go through a replay as its flow does, with a learner that is played; return what each step came to."""
    store = open_store(config.store)
    session = Session(
        RunContext(store, config.name, config, {}), SOURCE, Supervisor(config.name, Path(config.store) / "logs")
    )
    found, out = step_history(store, config.replay.run), quarantined_in(store, config.replay)
    with record_run(session):
        apart = PolicyDistance(store)
        steps = replay_steps(Rehearsal(session), SOURCE, config, found, out)
        return session, [finish_replayed(session, done, apart) for done in steps]


def pieces(config: RunConfig) -> list[Ref]:
    place = RunContext(open_store(config.store), config.name, config, {})
    return plan_work(place, SOURCE)


def quarantine(store: Store, step: int, count: int) -> list[str]:
    """Mark the first traces of a step of the base run as unfit."""
    (entry,) = (e for e in store.ledger.entries(run="base", stage="rollout") if e.step == step and not e.part)
    names = store.read(entry.slices("traces"), ["trace_id"])["trace_id"].to_pylist()[:count]
    store.quarantines.record(names, where="made up", reason="the verifier was broken", run="base")
    return names


def starts(store: Store, run: str) -> list[str]:
    """The keys of the policies that a run's trainings started from, by step."""
    return [entry.inputs["policy"] for entry in store.ledger.entries(run=run, stage="training")]


def trained(root: Path, **asked: Any) -> tuple[Store, list[dict[str, Any]]]:
    """Do a replay that trains; return the store and what each step came to."""
    _, steps = walk(ask(root, until="training", **asked))
    return open_store(root), steps
