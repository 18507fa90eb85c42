"""Which slices of a run are shared with another run, and which rows have expired."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import polars as pl

from flows.queries.store_reader import StoreReader
from storage.read.lineage import Work
from tasks.stages import EVALUATION, STEP_STAGES, shown_stage

SLICES: dict[str, Any] = {
    "run": pl.String,
    "step": pl.Int64,
    "stage": pl.String,
    "key": pl.String,
    "table": pl.String,
    "rows": pl.Int64,
    "own": pl.Boolean,
    "computed_by": pl.String,
    "finished": pl.Boolean,
    "used_by": pl.List(pl.String),
    "seconds": pl.Float64,
}
"""One row for each table that a piece of work made rows of: `used_by` names all runs that use it."""


def slices(library: StoreReader, run: str) -> pl.DataFrame:
    """Return the slices that a run uses, as in SLICES, by step. Raises NotThere."""
    rows = [
        {"run": run, "step": work.step, "table": table, "rows": work.num_rows(table)}
        | {
            "stage": shown_stage(work.stage, work.inputs),
            "key": work.key,
            "own": work.computed_by == run,
            "computed_by": work.computed_by,
        }
        | {"finished": work.finished, "used_by": list(work.runs), "seconds": _seconds(work)}
        for work in library.frames(run).graph.works.values()
        for table in sorted(work.tables)
    ]
    return pl.DataFrame(rows, schema=SLICES).sort("step", "stage", "key", "table")


def ledger(library: StoreReader, run: str, num_steps: int = 0) -> dict[str, Any]:
    """Return the ledger of a run as a grid of plain values. Raises NotThere.

    `stages` are the rows from top to bottom, `columns` one for each step with its `cells`, one for each stage; a cell
    is None where nothing is there, and one of `num_steps` that is not begun has no cells at all. `runs` are the runs
    that computed something of it, the run itself first; a cell's `by` is a number in it.
    """
    by_step = {each.step: _of_stages(each.works) for each in library.history(run).sampled_steps}
    for work in library.frames(run).graph.works.values():
        if shown_stage(work.stage, work.inputs) == EVALUATION:
            by_step.setdefault(work.step, {}).setdefault(EVALUATION, []).append(work)
    present = {stage for stages in by_step.values() for stage in stages}
    stages = [stage for stage in (*STEP_STAGES, EVALUATION) if stage in present]
    computed = Counter(work.computed_by for own in by_step.values() for each in own.values() for work in each)
    runs = [run, *(other for other, _ in computed.most_common() if other != run)]
    steps = sorted(by_step) or [0]
    last = max(steps[-1], num_steps - 1)
    columns = [
        {"step": step, "cells": [_cell(by_step[step].get(stage), runs) for stage in stages] if step in by_step else []}
        for step in range(steps[0], last + 1)
    ]
    return {"stages": stages, "columns": columns, "runs": runs, "num_pieces": [computed[name] for name in runs]}


def _of_stages(works: tuple[Work, ...]) -> dict[str, list[Work]]:
    found: dict[str, list[Work]] = {}
    for work in works:
        found.setdefault(work.stage, []).append(work)
    return found


def _cell(works: list[Work] | None, runs: list[str]) -> dict[str, Any] | None:
    """Return one stage of a step; of several pieces of work, the first one's key stands for all."""
    if not works:
        return None
    rows: Counter[str] = Counter()
    for work in works:
        rows.update({table: work.num_rows(table) for table in work.tables})
    return {
        "key": works[0].key,
        "by": runs.index(works[-1].computed_by),
        "finished": all(work.finished for work in works),
        "rows": dict(sorted(rows.items())),
        "seconds": sum(seconds for work in works if (seconds := _seconds(work)) is not None),
        "used_by": sorted({name for work in works for name in work.runs}),
    }


def _seconds(work: Work) -> float | None:
    """Return the wall-clock of finished work; None as long as parts are missing."""
    if not work.finished:
        return None
    return (work.entry.finished_at - work.entry.started_at).total_seconds()


def expired_rows(library: StoreReader, works: Iterable[Work | None]) -> list[dict[str, Any]]:
    """Return what some work has lost, by table: table, num_rows, `at` (the last time) and hours (its retention then).

    Numbers that come from those tables are of the rows that are left.
    """
    once = {work.key: work for work in works if work is not None}
    pieces = [piece for work in once.values() for piece in work.slices]
    found: dict[str, dict[str, Any]] = {}
    for each in sorted(library.store.slices.expired_slices.find(pieces), key=lambda each: (each.table, each.at)):
        before = found.get(each.table, {"num_rows": 0})
        told = {"table": each.table, "num_rows": before["num_rows"] + each.rows, "at": each.at, "hours": each.hours}
        found[each.table] = told
    return list(found.values())


def expired_rows_of_runs(library: StoreReader, *runs: str) -> list[dict[str, Any]]:
    """Return the same of all work that some runs use. Raises NotThere for an unknown run."""
    return expired_rows(library, (work for run in runs for work in library.frames(run).graph.works.values()))


def lost(library: StoreReader, works: Iterable[Work], table: str) -> bool:
    """Say whether any rows that some work made of a table were dropped."""
    pieces = [piece for work in works for piece in work.slices_of(table)]
    return bool(library.store.slices.expired_slices.find(pieces))
