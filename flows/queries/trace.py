"""One trace as a run uses it: found by its id, its row, what the run made of it, and the samples it was trained as."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import polars as pl

from flows.queries.notes import notes_of
from flows.queries.outcomes import packed_samples, quarantines_of, use_of
from flows.queries.request import NotThere
from flows.queries.row_lineage import UnknownId, find_rows, identify
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import StoreReader, has_lost_rows
from flows.queries.views import select_rows

STORAGE = ("run", "key", "attempt", "seq")
"""Columns of storage that a trace's row is shown without; `step` stays."""


@dataclass(frozen=True)
class FoundTrace:
    """A trace, and the work of one run that it went through."""

    run: str
    lineage: StepLineage
    row: Mapping[str, Any]
    """All columns of the table `traces`, and `step`."""

    @property
    def trace_id(self) -> str:
        """Its whole id."""
        return str(self.row["trace_id"])

    @property
    def key(self) -> str:
        """The key of the work that made it, as the run uses it: its scoring again, where there was one."""
        return self.lineage.traces.key

    @property
    def step(self) -> int:
        """The step that it was sampled for; of an evaluation the version that was scored."""
        return self.lineage.traces.step


def find_trace(reader: StoreReader, run: str, trace_id: str, key: str = "") -> FoundTrace:
    """Return a trace of a run, by its id or the first eight characters of it or more.

    `key` is the work that made it, which saves a search through the run; where it is not there, the run is searched.
    Raises NotThere, with the nearest ids, and where the beginning is that of several.
    """
    history, frames = reader.history(run), reader.frames(run)
    works = {work.key: work for work in history.rollouts}
    # A link names the work that made the trace: its rows are read instead of those of every step.
    hinted = [work for name, work in works.items() if key and name.startswith(key)]
    try:
        nodes = hinted and find_rows(frames, "trace", hinted, pl.col("trace_id") == trace_id).roots
        nodes = nodes or identify(frames, trace_id, "trace").roots
    except UnknownId as error:
        hints = [f"it is one of {', '.join(runs)}"] if (runs := _runs_with(reader, trace_id)) else []
        if has_lost_rows(reader, list(works.values()), "traces"):
            hints.append("rows of its traces were dropped for their age (`stagecoach maintain --retain`)")
        raise NotThere("; ".join((str(error), *hints))) from error
    # Rollouts of one id may have been made at several steps, as in a replay: the last one counts. While they are scored
    # again, those that are not yet are in the work that sampled them alone.
    made = max((frames.graph.works[node.key] for node in nodes), key=lambda work: (work.key in works, work.step))
    rows = frames.rows([made], "traces").filter(trace_id=nodes[0].id).drop(STORAGE)
    return FoundTrace(run, history.lineage(made), rows.collect().row(0, named=True))


def trace_use(reader: StoreReader, trace_id: str, run: str = "") -> FoundTrace:
    """Return a trace by its id, or the first eight characters of it or more, as a run uses it.

    Without a run it is as the run has it that computed it first. Raises NotThere, with the nearest ids.
    """
    if run:
        return find_trace(reader, run, trace_id)
    nodes = identify(reader.frames(), trace_id, "trace").roots
    work = min((reader.graph.works[node.key] for node in nodes), key=attrgetter("age"))
    # The run that made it may have been removed since; then the first that uses it.
    run = work.computed_by if work.computed_by in work.runs else work.runs[0]
    return find_trace(reader, run, nodes[0].id, work.key)


def _runs_with(reader: StoreReader, trace_id: str) -> list[str]:
    try:
        nodes = identify(reader.frames(), trace_id, "trace").roots
    except UnknownId:
        return []
    return sorted({run for node in nodes for run in reader.graph.works[node.key].runs})


def outcome_of(reader: StoreReader, trace: FoundTrace) -> dict[str, Any]:
    """Return what the run made of the trace, as `stagecoach why` has it of each run, with its quarantines and notes."""
    frames = reader.frames()
    return {**use_of(frames, trace.lineage, trace.row), "quarantines": quarantines_of(frames, trace.trace_id)} | {
        "notes": notes_of(reader.store, trace_id=trace.trace_id)
    }


def other_runs(trace: FoundTrace) -> list[str]:
    """Return the other runs that use the same rows."""
    return [run for run in trace.lineage.traces.runs if run != trace.run]


def samples(reader: StoreReader, trace: FoundTrace) -> pl.DataFrame:
    """Return the samples of a trace with their places in the batch; see `packed_samples`."""
    return packed_samples(reader.frames(), trace.lineage, trace.trace_id)


_WEIGHTS = """
select sample_id, rl_weights, ce_weights, ref_kl_weights
from batch_samples
join sample_weights on sample_weights.key = batch_key and sample_weights."row" = batch_samples."row"
    and sample_weights.place = batch_samples.place
where trace_id = $id
"""


def packed_weights(reader: StoreReader, trace: FoundTrace, samples: pl.DataFrame) -> pl.DataFrame:
    """Return what the tokens of each packed sample of a trace weigh together, as view `sample_weights` has it.

    `samples` are those of the trace. Columns: `sample_id`, `rl_weights`, `ce_weights`, `ref_kl_weights`.
    """
    numbers = samples["row"].drop_nulls().unique().to_list()
    return select_rows(reader.frames(), [trace.lineage], numbers, _WEIGHTS, id=trace.trace_id)
