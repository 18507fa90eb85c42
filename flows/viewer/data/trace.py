"""A trace as a run uses it: which work made it, the row itself, and what the run made of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from flows.queries.request import NotThere
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import Library
from flows.viewer.data.retired import lost
from flows.viewer.data.trace_index import index
from flows.views.identify import NEAREST, SHORTEST_PREFIX, nearest
from flows.views.why import quarantines_of, use_of
from storage.read.lineage import Work

OWN = ("run", "key", "attempt", "seq")
"""Columns of storage that a trace's row is shown without; `step` stays."""


@dataclass(frozen=True)
class Found:
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


def find_trace(library: Library, run: str, trace_id: str, key: str = "") -> Found:
    """Return a trace of a run, by its id or the first eight characters of it or more.

    `key` is the work that made it, which saves a search through the run; where it is not there, the run is searched.
    Raises NotThere, with the nearest ids and the runs that have it, and where the beginning is that of several.
    """
    lineages = library.history(run).lineages
    hinted = [lineage for lineage in lineages if key and lineage.traces.key.startswith(key)]
    for some in (hinted, lineages):
        found = _matching(index(library, [lineage.traces for lineage in some]), trace_id)
        if len(found) > 1:
            raise NotThere(f"{trace_id!r} is the beginning of several traces of run {run!r}: {_listed(found)}")
        if found:
            ((whole, keys),) = found.items()
            lineage = max((each for each in some if each.traces.key in keys), key=lambda each: each.traces.step)
            return Found(run, lineage, _row(library, lineage.traces, whole))
    raise NotThere(_nowhere(library, run, trace_id))


def uses(library: Library, trace_id: str) -> list[Found]:
    """Return a trace as each run uses it, in the order of the runs; none where no run does.

    Raises NotThere where the beginning of an id is that of several.
    """
    works = library.graph.makers("traces")
    found = _matching(index(library, works), trace_id)
    if len(found) > 1:
        raise NotThere(f"{trace_id!r} is the beginning of several traces: {_listed(found)}")
    keys = {key for each in found.values() for key in each}
    runs = {run for work in works if work.key in keys for run in work.runs}
    used = [
        (run, lineage)
        for run in library.store.runs.names()
        if run in runs
        for lineage in library.history(run).lineages
        if lineage.traces.key in keys
    ]
    made = {lineage.traces.key: lineage.traces for _, lineage in used}
    rows = {key: _row(library, work, whole) for whole in found for key, work in made.items()}
    return [Found(run, lineage, rows[lineage.traces.key]) for run, lineage in used]


def outcome_of(library: Library, found: Found) -> dict[str, Any]:
    """Return what the run made of the trace, as `stagecoach why` has it of each run, with the quarantines it is in."""
    frames = library.frames()
    return {**use_of(frames, found.lineage, found.row), "quarantines": quarantines_of(frames, found.trace_id)}


def other_runs(found: Found) -> list[str]:
    """Return the other runs that use the same rows."""
    return [run for run in found.lineage.traces.runs if run != found.run]


def _matching(known: pl.DataFrame, trace_id: str) -> dict[str, list[str]]:
    """Return the ids that are meant, each with the keys of the work that made it."""
    found = known.filter(pl.col("trace_id") == trace_id)
    if found.is_empty() and len(trace_id) >= SHORTEST_PREFIX:
        found = known.filter(pl.col("trace_id").str.starts_with(trace_id))
    grouped = found.group_by("trace_id", maintain_order=True).agg("key").head(NEAREST + 1)
    return dict(grouped.iter_rows())


def _row(library: Library, work: Work, trace_id: str) -> dict[str, Any]:
    rows = library.frames().rows([work], "traces").filter(pl.col("trace_id") == trace_id)
    return rows.drop(OWN).collect().row(0, named=True)


def _listed(found: Mapping[str, Any]) -> str:
    return f"{', '.join(list(found)[:NEAREST])}; give more of it"


def _nowhere(library: Library, run: str, trace_id: str) -> str:
    others = [each.run for each in uses(library, trace_id)]
    known = index(library, [lineage.traces for lineage in library.history(run).lineages])["trace_id"]
    near = [] if others else nearest(trace_id, known)
    told = f"; it is one of {', '.join(dict.fromkeys(others))}" if others else ""
    told += f"; the nearest ids are {', '.join(near)}" if near else ""
    if lost(library, [lineage.traces for lineage in library.history(run).lineages], "traces"):
        told += "; rows of its traces were dropped for their age (`stagecoach maintain --retain`)"
    return f"run {run!r} has no trace {trace_id!r}{told}"
