"""When the work of a run was done, stage by stage, out of the ledger alone; and what became of the run meanwhile."""

from datetime import datetime
from typing import Any

import polars as pl

from flows.queries.store_reader import Library
from storage.read.lineage import Work
from tasks.stages import shown_stage

MOMENT = pl.Datetime("us", "UTC")
STAGE_TIMES: dict[str, Any] = {
    "run": pl.String,
    "step": pl.Int64,
    "stage": pl.String,
    "key": pl.String,
    "own": pl.Boolean,
    "computed_by": pl.String,
    "finished": pl.Boolean,
    "started_at": MOMENT,
    "finished_at": MOMENT,
    "seconds": pl.Float64,
    "tokens": pl.Int64,
}
"""One row for each piece of work that a run uses. The rollouts of an evaluation are the stage `evaluation`, their step
is the version of the policy. `own` is False where another run computed it: it was done in that run's time."""


def stage_times(library: Library, run: str) -> pl.DataFrame:
    """Return when each piece of work that a run uses was done, as in STAGE_TIMES, in order of time. Raises NotThere.

    Work of which only parts are committed ends with the last of them so far.
    """
    rows = []
    for work in library.frames(run).graph.works.values():
        begun, ended, tokens = _span(library, work)
        rows.append(
            {
                "run": run,
                "step": work.step,
                "stage": shown_stage(work.stage, work.inputs),
                "key": work.key,
                "own": work.computed_by == run,
                "computed_by": work.computed_by,
                "finished": work.finished,
                "started_at": begun,
                "finished_at": ended,
                "seconds": (ended - begun).total_seconds(),
                "tokens": tokens,
            }
        )
    return pl.DataFrame(rows, schema=STAGE_TIMES).sort("started_at", "step", "key")


def _span(library: Library, work: Work) -> tuple[datetime, datetime, int]:
    entries = [work.entry] if work.finished else library.store.ledger.parts(work.key) or [work.entry]
    tokens = sum(each.tokens for each in entries)
    return min(each.started_at for each in entries), max(each.finished_at for each in entries), tokens


def events(library: Library, run: str) -> list[dict[str, Any]]:
    """Return the events of a run as plain values: event, at, step, message. Raises NotThere."""
    library.frames(run)
    names = ("event", "at", "step", "message")
    return [{name: getattr(each, name) for name in names} for each in library.store.runs.events(run)]
