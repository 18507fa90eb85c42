"""The state of a run in a word, from its events and its process, and what its policies scored on held-out examples."""

import socket
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import polars as pl
import pyarrow as pa

from configs.run import RunConfig
from flows.queries.scores import READ, RecordedEvaluation, recorded_evaluations, score_rollouts
from flows.queries.store_reader import StoreReader, each_once
from flows.services.ownership import was_alive
from storage.read.lineage import row_identities
from storage.runs import Event
from storage.schemas.stage_tables import TRACES

GOING = ("started", "resumed")


def process_gone(event: Event) -> bool:
    """Say whether a run that is said to be going has no process any more; False where that cannot be seen from here.

    A process that began after the event is another one with the same number.
    """
    if event.event not in GOING or event.host != socket.gethostname():
        return False
    return not was_alive(event.pid, event.at)


GONE = "its process is gone"
GOOD = ("finished",)
CALM = ("evicted", "cancelled", "removed")
"""Ends that somebody or something chose; what was done by then is kept."""


def state_of(event: Event) -> dict[str, Any]:
    """Return the last event of a run as plain values: `state` in a word, `look` (good, bad, warn, going), `message`."""
    if event.event in GOING:
        gone = process_gone(event)
        return {"state": GONE if gone else "going", "look": "warn" if gone else "going", "message": event.message}
    return {"state": event.event, "look": look_of(event.event), "message": event.message}


def look_of(event: str) -> str:
    """Return how an event is to be taken: good, bad, warn, or going where the run goes on."""
    if event in GOING:
        return "going"
    return "good" if event in GOOD else "warn" if event in CALM else "bad"


def is_going(event: Event) -> bool:
    """Say whether a run may still get further."""
    return event.event in GOING and not process_gone(event)


def any_going(library: StoreReader, *runs: str) -> bool:
    """Say whether any of some runs may still get further, as far as can be seen from here."""
    return any(is_going(library.store.runs.events(run)[-1]) for run in runs)


def seconds_at_work(events: Sequence[Event], last_work: datetime | None) -> float:
    """Return the wall-clock of a run without the time between an end and a resumption.

    A run that is going, or whose process is gone, counts up to the last work that it finished.
    """
    total = 0.0
    for event, later in zip(events, (*events[1:], None), strict=True):
        if event.event not in GOING:
            continue
        until = last_work if later is None or later.event in GOING else later.at
        if later is not None and until is not None:
            until = min(until, later.at)
        total += max(0.0, (until - event.at).total_seconds()) if until else 0.0
    return total


_SCHEMA = pa.schema([TRACES.arrow.field(name) for name in READ])
SCORES = {
    "run": pl.String,
    "version": pl.Int64,
    "set": pl.String,
    "environment": pl.String,
    "average": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "num_examples": pl.Int64,
    "num_attempts": pl.Int64,
}


def held_out(library: StoreReader, run: str) -> list[dict[str, Any]]:
    """Return the evaluations of a run as `stagecoach show` does: `version`, `set` and `scores`. Raises NotThere."""
    done = row_identities(work for work in library.history(run).evaluations if work.finished)
    if not done:
        return []
    num_events = len(library.store.runs.events(run))  # each may bring another config
    return library.cached(("held-out", run, num_events, done), lambda: _held_out(library, run))


def _held_out(library: StoreReader, run: str) -> list[dict[str, Any]]:
    config = library.config(run)
    found = recorded_evaluations(library.store, run, config)
    works = library.graph.works
    known = [each for each in found if all(entry.key in works for entry in each.rounds)]  # the store may move on
    by_name = {_name(each, config): each for each in known}

    def read(names: list[tuple[object, ...]]) -> dict[tuple[object, ...], dict[str, Any]]:
        return _read(library, {name: by_name[name] for name in names}, config)

    return list(each_once(library, "held-out scores", list(by_name), read).values())


def scores(library: StoreReader, run: str) -> pl.DataFrame:
    """Return one row for each policy, set and environment that was evaluated, as in SCORES. Raises NotThere.

    `low` and `high` are the ends of the 95% interval of the average; null where there is none.
    """
    rows = [
        {"run": run, "version": each["version"], "set": each["set"]}
        | {name: score[name] for name in ("environment", "average", "num_examples", "num_attempts")}
        | {end: (score["interval"] or {}).get(end) for end in ("low", "high")}
        for each in held_out(library, run)
        for score in each["scores"]
    ]
    return pl.DataFrame(rows, schema=SCORES)


def _name(each: RecordedEvaluation, config: RunConfig) -> tuple[object, ...]:
    """Return all that the scores come from: the rollouts, and what the config says of seats and passes."""
    seats = tuple(environment.model_dump_json() for environment in config.environments)
    rounds = row_identities(each.rounds)
    return each.set_name, each.version, rounds, each.pass_at, seats


def _read(
    library: StoreReader, wanted: dict[tuple[object, ...], RecordedEvaluation], config: RunConfig
) -> dict[tuple[object, ...], dict[str, Any]]:
    works = [library.graph.works[entry.key] for each in wanted.values() for entry in each.rounds]
    rows = library.frames().rows(works, "traces").select("key", "seq", *READ).collect().sort("key", "seq")
    by_key = {str(key): own for (key,), own in rows.group_by("key", maintain_order=True)}
    empty = rows.clear()

    def tables(each: RecordedEvaluation) -> Sequence[pa.Table]:
        return [by_key.get(entry.key, empty).select(READ).to_arrow().cast(_SCHEMA) for entry in each.rounds]

    return {
        name: score_rollouts(each.set_name, each.version, tables(each), config.environments, each.pass_at).described
        for name, each in wanted.items()
    }
