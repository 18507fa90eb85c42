"""The ledger of a run: its slices and who shares them, as a grid of cells, and when the stages were at work."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

import polars as pl

from flows.queries.store_reader import StoreReader
from flows.reporting.svg import ticks
from storage.read.lineage import Work
from tasks.stages import EVALUATION, EVALUATION_ASSIGNMENT, STEP_STAGES, names, shown_stage

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


def slices(reader: StoreReader, run: str) -> pl.DataFrame:
    """Return the slices that a run uses, as in SLICES, by step. Raises NotThere."""
    rows = [
        _work_values(run, work)
        | {"table": table, "rows": work.num_rows(table), "used_by": list(work.runs), "seconds": _seconds(work)}
        for work in reader.frames(run).graph.works.values()
        for table in sorted(work.tables)
    ]
    return pl.DataFrame(rows, schema=SLICES).sort("step", "stage", "key", "table")


def _work_values(run: str, work: Work) -> dict[str, Any]:
    """Return what a piece of work is to a run that uses it."""
    return {
        "run": run,
        "step": work.step,
        "stage": shown_stage(work.stage, work.inputs),
        "key": work.key,
        "own": work.computed_by == run,
        "computed_by": work.computed_by,
        "finished": work.finished,
    }


def ledger(reader: StoreReader, run: str, num_steps: int = 0) -> dict[str, Any]:
    """Return the ledger of a run as a grid of plain values. Raises NotThere.

    `stages` are the rows from top to bottom, `columns` one for each step with its `cells`, one for each stage; a cell
    is None where nothing is there, and one of `num_steps` that is not begun has no cells at all. `runs` are the runs
    that computed something of it, the run itself first; a cell's `by` is a number in it.
    """
    placed = [(each.step, work.stage, work) for each in reader.history(run).sampled_steps for work in each.works]
    shown = [(work, shown_stage(work.stage, work.inputs)) for work in reader.frames(run).graph.works.values()]
    placed += [(work.step, stage, work) for work, stage in shown if stage == EVALUATION]
    by_step: dict[int, dict[str, list[Work]]] = {}
    for step, stage, work in placed:
        by_step.setdefault(step, {}).setdefault(stage, []).append(work)
    present = {stage for stages in by_step.values() for stage in stages}
    stages = [stage for stage in (*STEP_STAGES, EVALUATION) if stage in present]
    computed = Counter(work.computed_by for own in by_step.values() for each in own.values() for work in each)
    runs = [run, *(other for other, _ in computed.most_common() if other != run)]
    steps = sorted(by_step) or [0]
    # Steps that are planned are columns too, so that the grid shows how far the run is.
    last = max(steps[-1], num_steps - 1)
    columns = [
        {"step": step, "cells": [_cell(by_step[step].get(stage), runs) for stage in stages] if step in by_step else []}
        for step in range(steps[0], last + 1)
    ]
    return {"stages": stages, "columns": columns, "runs": runs, "num_pieces": [computed[name] for name in runs]}


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


def stage_times(reader: StoreReader, run: str) -> pl.DataFrame:
    """Return when each piece of work that a run uses was done, as in STAGE_TIMES, in order of time. Raises NotThere.

    Work of which only parts are committed ends with the last of them so far.
    """
    rows = []
    for work in reader.frames(run).graph.works.values():
        begun, ended, tokens = _span(reader, work)
        times = {"started_at": begun, "finished_at": ended, "seconds": (ended - begun).total_seconds()}
        rows.append(_work_values(run, work) | times | {"tokens": tokens})
    return pl.DataFrame(rows, schema=STAGE_TIMES).sort("started_at", "step", "key")


def _span(reader: StoreReader, work: Work) -> tuple[datetime, datetime, int]:
    # A finished entry spans all its parts; before that they are all there is.
    entries = [work.entry] if work.finished else reader.store.ledger.parts(work.key) or [work.entry]
    # Parts that do not count have slices that are not among those of the work.
    tokens = sum(each.tokens for each in entries if {*each.outputs} <= {*work.slices})
    return min(each.started_at for each in entries), max(each.finished_at for each in entries), tokens


def events(reader: StoreReader, run: str) -> list[dict[str, Any]]:
    """Return the events of a run, lost services among them, as plain values: event, at, step, message.

    Raises NotThere.
    """
    reader.frames(run)
    names, runs = ("event", "at", "step", "message"), reader.store.runs
    found = sorted([*runs.events(run), *runs.lost_services(run)], key=attrgetter("at"))
    return [{name: getattr(each, name) for name in names} for each in found]


LANES = names()
CUT_SHARE = 0.08
"""A stretch in which nothing was done is cut where it is longer than this share of the time of work."""
LEFT_SHARE = 0.015
"""What is left of it."""


def lanes(times: pl.DataFrame, events: Sequence[Mapping[str, Any]], recent: int = 0) -> dict[str, Any]:
    """Return own work as bars by stage, and the events of the run; with `recent`, the last steps alone.

    All places are seconds of shown time: `length` of all, `start` and `end` of bars, `at` of events and ticks. A bar
    lies in a `row` of its lane: work of one stage that was done at the same time lies in several. `cuts` say where and
    how many seconds were left out.
    """
    own = times.filter(pl.col("own"))
    if recent and len(own):
        steps = own.filter(~pl.col("stage").is_in([EVALUATION, EVALUATION_ASSIGNMENT]))["step"].unique().sort()
        own = own.filter(pl.col("step") >= (steps.tail(recent).min() or 0))
    if own.is_empty():
        return {"length": 0.0, "lanes": [], "events": [], "ticks": [], "cuts": []}
    begun = own["started_at"].min()
    assert isinstance(begun, datetime)
    spans = [(_since(begun, row["started_at"]), _since(begun, row["finished_at"]), row) for row in own.to_dicts()]
    shown = _Shown([(start, end) for start, end, _ in spans])
    bars: dict[str, list[dict[str, Any]]] = {}
    for start, end, row in spans:
        facts = {name: row[name] for name in ("step", "key", "finished", "seconds", "tokens")}
        bars.setdefault(row["stage"], []).append({**facts, "start": shown.at(start), "end": shown.at(end)})
    order = [*LANES, *sorted(set(bars) - set(LANES))]
    # A run's first event is a little before its first work: it stands at the begin.
    noted = [event for event in events if not recent or event["at"] >= begun]
    marks = [{**event, "at": shown.at(max(0.0, _since(begun, event["at"])))} for event in noted]
    return {
        "length": shown.length,
        "lanes": [{"stage": stage, **_rows(bars[stage])} for stage in order if stage in bars],
        "events": marks,
        "ticks": shown.ticks(),
        "cuts": shown.cuts,
    }


class _Shown:
    """Time without the stretches in which nothing was done."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        busy = _merge_spans(spans)
        work = sum(end - start for start, end in busy) or 1.0
        # Measured by the time of work, not by all time: else a night of standing still would hide every other pause.
        pieces = _merge_spans(spans, CUT_SHARE * work)
        self.cuts: list[dict[str, float]] = []
        self._pieces: list[tuple[float, float, float]] = []
        at = 0.0
        for number, (start, end) in enumerate(pieces):
            if number:
                self.cuts.append({"at": at + LEFT_SHARE * work / 2, "seconds": start - pieces[number - 1][1]})
                at += LEFT_SHARE * work
            self._pieces.append((start, end, at))
            at += end - start
        self.length = at or 1.0

    def at(self, seconds: float) -> float:
        """Return the place of a moment; one in a cut stretch lies at the end of what was before."""
        last = 0.0
        for number, (start, end, place) in enumerate(self._pieces):
            if seconds < start:
                before = self._pieces[number - 1][1] if number else 0.0
                return min(place, last + max(0.0, seconds - before))
            if seconds <= end:
                return place + seconds - start
            last = place + end - start
        return min(self.length, last + max(0.0, seconds - self._pieces[-1][1]))

    def ticks(self) -> list[dict[str, float]]:
        """Return round numbers of seconds since the begin, and where they lie."""
        width = next(iter(ticks(0.0, self.length, 8)[1:]), self.length)
        found: list[dict[str, float]] = []
        for start, end, _ in self._pieces:
            first = int(-(-start // width))
            for number in range(first, int(end // width) + 1):
                place = self.at(number * width)
                # Beside a cut, round numbers that are far apart lie close together: labels must not overlap.
                if not found or place - found[-1]["at"] > 0.6 * width:
                    found.append({"at": place, "seconds": number * width})
        return found


def _merge_spans(spans: Sequence[tuple[float, float]], idle: float = 0.0) -> list[tuple[float, float]]:
    """Return spans in order, those taken together that overlap or are no more than `idle` apart."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1] + idle:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _rows(bars: list[dict[str, Any]]) -> dict[str, Any]:
    """Return bars in as few rows as keep them apart."""
    ends: list[float] = []
    for bar in sorted(bars, key=lambda bar: (bar["start"], bar["end"])):
        # The first row that is free, in order of starts, takes as few rows as can be.
        row = next((number for number, end in enumerate(ends) if end <= bar["start"]), len(ends))
        ends[row:] = [bar["end"], *ends[row + 1 :]]
        bar["row"] = row
    return {"rows": len(ends), "bars": bars}


def _since(begun: datetime, moment: datetime) -> float:
    return (moment - begun).total_seconds()
