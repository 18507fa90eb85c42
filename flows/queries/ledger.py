"""The ledger of a run: its slices and who shares them, as a grid of cells, and when the stages were at work."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import polars as pl

from flows.queries.store_reader import StoreReader
from flows.reporting.svg import ticks
from storage.read.lineage import Work
from tasks.stages import EVALUATION, EVALUATION_ASSIGNMENT, STEP_STAGES, names, shown_stage


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
    places = _Places([(start, end) for start, end, _ in spans])
    bars: dict[str, list[dict[str, Any]]] = {}
    for start, end, row in spans:
        facts = {name: row[name] for name in ("step", "key", "finished", "seconds", "tokens")}
        bars.setdefault(row["stage"], []).append({**facts, "start": places.at(start), "end": places.at(end)})
    order = [*LANES, *sorted(set(bars) - set(LANES))]
    # A run's first event is a little before its first work: it stands at the begin.
    noted = [event for event in events if not recent or event["at"] >= begun]
    marks = [{**event, "at": places.at(max(0.0, _since(begun, event["at"])))} for event in noted]
    return {
        "length": places.length,
        "lanes": [{"stage": stage, **_rows(bars[stage])} for stage in order if stage in bars],
        "events": marks,
        "ticks": places.ticks(),
        "cuts": places.cuts,
    }


class _Places:
    """Where moments are drawn: time without most of the stretches in which nothing was done."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        work = sum(end - start for start, end in _merge_spans(spans)) or 1.0
        # Measured by the time of work, not by all time: else a night of standing still would hide every other pause.
        self._pieces = _merge_spans(spans, CUT_SHARE * work)
        left = LEFT_SHARE * work
        lengths = [end - start for start, end in self._pieces]
        begins = [left * number + sum(lengths[:number]) for number in range(len(lengths))]
        self._knots = [moment for piece in self._pieces for moment in piece]
        self._places = [
            place for begin, length in zip(begins, lengths, strict=True) for place in (begin, begin + length)
        ]
        self.length = self._places[-1] or 1.0
        self.cuts = [
            {"at": begin - left / 2, "seconds": piece[0] - earlier[1]}
            for begin, (earlier, piece) in zip(begins[1:], pairwise(self._pieces), strict=True)
        ]

    def at(self, seconds: float) -> float:
        """Return the place of a moment; what is after all work lies at the end."""
        return float(np.interp(seconds, self._knots, self._places))

    def ticks(self) -> list[dict[str, float]]:
        """Return round numbers of seconds since the begin, and where they lie."""
        width = next(iter(ticks(0.0, self.length, 8)[1:]), self.length)
        marks: list[dict[str, float]] = []
        for start, end in self._pieces:
            for number in range(int(-(-start // width)), int(end // width) + 1):
                place = self.at(number * width)
                # Beside a cut, round numbers that are far apart lie close together: labels must not overlap.
                if not marks or place - marks[-1]["at"] > 0.6 * width:
                    marks.append({"at": place, "seconds": number * width})
        return marks


def _merge_spans(spans: Sequence[tuple[float, float]], idle: float = 0.0) -> list[tuple[float, float]]:
    """Return spans in order, those taken together that overlap or are no more than `idle` apart."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + idle:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


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
