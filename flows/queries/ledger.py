"""The ledger of a run: its slices and who shares them, as a grid of cells; and its events."""

from collections import Counter
from operator import attrgetter
from typing import Any

from flows.queries.store_reader import StoreReader
from storage.read.lineage import Work
from tasks.stages import EVALUATION, STEP_STAGES, shown_stage


def ledger(reader: StoreReader, run: str, num_steps: int = 0) -> dict[str, Any]:
    """Return the ledger of a run as a grid of plain values. Raises NotThere.

    `stages` are the rows from top to bottom, `columns` one for each step with its `cells`, one for each stage; a cell
    is None where nothing is there, and one of `num_steps` that is not begun has no cells at all. `runs` are the runs
    that computed something of it, the run itself first; a cell's `by` is a number in it.
    """
    placed = [((step.step, work.stage), work) for step in reader.history(run).sampled_steps for work in step.works]
    works = reader.frames(run).graph.works.values()
    placed += [((w.step, EVALUATION), w) for w in works if shown_stage(w.stage, w.inputs) == EVALUATION]
    by_place: dict[tuple[int, str], list[Work]] = {}
    for place, work in placed:
        by_place.setdefault(place, []).append(work)
    begun = {step for step, _ in by_place}
    stages = [stage for stage in (*STEP_STAGES, EVALUATION) if any(stage == name for _, name in by_place)]
    computed = Counter(work.computed_by for _, work in placed)
    runs = [run, *(other for other, _ in computed.most_common() if other != run)]
    # Steps that are planned are columns too, so that the grid shows how far the run is.
    columns = [
        {"step": step, "cells": [_cell(by_place.get((step, stage)), runs) for stage in stages if step in begun]}
        for step in range(min(begun, default=0), max([0, num_steps - 1, *begun]) + 1)
    ]
    return {"stages": stages, "columns": columns, "runs": runs, "num_pieces": [computed[name] for name in runs]}


def _cell(works: list[Work] | None, runs: list[str]) -> dict[str, Any] | None:
    """Return one stage of a step; of several pieces of work, the first one's key stands for all."""
    if not works:
        return None
    finished = all(work.finished for work in works)
    return {"key": works[0].key, "by": runs.index(works[-1].computed_by), "finished": finished}


def events(reader: StoreReader, run: str) -> list[dict[str, Any]]:
    """Return the events of a run, lost services among them, as plain values: event, at, step, message.

    Raises NotThere.
    """
    reader.frames(run)
    names, runs = ("event", "at", "step", "message"), reader.store.runs
    found = sorted([*runs.events(run), *runs.lost_services(run)], key=attrgetter("at"))
    return [{name: getattr(each, name) for name in names} for each in found]
