"""What the policies of a run scored on held-out examples, without reading any rollout twice."""

from collections.abc import Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from configs.run import RunConfig
from flows.queries.scores import READ, RecordedEvaluation, recorded_evaluations, score_rollouts
from flows.queries.store_reader import Library, each_once
from storage.read.lineage import row_identities
from storage.schemas.stage_tables import TRACES

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


def held_out(library: Library, run: str) -> list[dict[str, Any]]:
    """Return the evaluations of a run as `stagecoach show` does: `version`, `set` and `scores`. Raises NotThere."""
    done = row_identities(work for work in library.history(run).evaluations if work.finished)
    if not done:
        return []
    num_events = len(library.store.runs.events(run))  # each may bring another config
    return library.kept(("held-out", run, num_events, done), lambda: _held_out(library, run))


def _held_out(library: Library, run: str) -> list[dict[str, Any]]:
    config = library.config(run)
    found = recorded_evaluations(library.store, run, config)
    works = library.graph.works
    known = [each for each in found if all(entry.key in works for entry in each.rounds)]  # the store may move on
    by_name = {_name(each, config): each for each in known}

    def read(names: list[tuple[object, ...]]) -> dict[tuple[object, ...], dict[str, Any]]:
        return _read(library, {name: by_name[name] for name in names}, config)

    return list(each_once(library, "held-out scores", list(by_name), read).values())


def scores(library: Library, run: str) -> pl.DataFrame:
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
    library: Library, wanted: dict[tuple[object, ...], RecordedEvaluation], config: RunConfig
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
