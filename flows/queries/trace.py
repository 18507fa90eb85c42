"""One trace as a run uses it: found by its id, its row, what the run made of it, and the samples it was trained as."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from flows.queries.notes import notes_of
from flows.queries.outcomes import packed_samples, quarantines_of, use_of
from flows.queries.request import NotThere
from flows.queries.row_lineage import NEAREST, SHORTEST_PREFIX, nearest
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import StoreReader, has_lost_rows
from flows.queries.views import select_rows
from storage.read.lineage import Work

INDEX = (
    *("key", "trace_id", "step", "environment", "example_id", "agent", "group_id", "reward", "error_class"),
    *("policy_version",),
)


def index(reader: StoreReader, works: Iterable[Work]) -> pl.DataFrame:
    """Return one row for each trace that some works made, columns as in `INDEX`, work by work."""
    # Held work by work: of a run that goes on only what is new is read.
    named = {work.identity: work for work in works}
    unread = reader.frames().rows([], "traces").select(INDEX).collect()

    def read(names: list[tuple[str, ...]]) -> dict[tuple[str, ...], pl.DataFrame]:
        missing = [named[name] for name in names]
        rows = reader.frames().rows(missing, "traces").select(*INDEX, "seq").collect().sort("seq").drop("seq")
        # As a dictionary polars would run a query for each part to learn its key.
        parts = {part["key"][0]: part for part in rows.partition_by("key")}
        return {name: parts.get(named[name].key, unread) for name in names}

    return pl.concat([unread, *reader.cache.each_once("trace index", list(named), read).values()])


OWN = ("run", "key", "attempt", "seq")
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
    Raises NotThere, with the nearest ids and the runs that have it, and where the beginning is that of several.
    """
    history = reader.history(run)
    # A link names the work that made the trace: one index is read instead of that of every step.
    hinted = [work for work in history.rollouts if key and work.key.startswith(key)]
    for some in (hinted, history.rollouts):
        found = _matching(index(reader, some), trace_id)
        if len(found) > 1:
            raise NotThere(f"{trace_id!r} is the beginning of several traces of run {run!r}: {_list_names(found)}")
        if found:
            ((whole, keys),) = found.items()
            # Rollouts of one id may have been made at several steps, as in a replay: the last one counts.
            made = max((work for work in some if work.key in keys), key=lambda work: work.step)
            return FoundTrace(run, history.lineage(made), _row(reader, made, whole))
    raise NotThere(_nowhere(reader, run, trace_id))


def uses(reader: StoreReader, trace_id: str) -> list[FoundTrace]:
    """Return a trace as each run uses it, in the order of the runs.

    Raises NotThere, with the nearest ids, where no run does, and where the beginning of an id is that of several.
    """
    found = _uses(reader, trace_id)
    if not found:
        near = nearest(trace_id, index(reader, reader.graph.makers("traces"))["trace_id"])
        hint = f"; the nearest ids are {', '.join(near)}" if near else "; `stagecoach traces RUN` lists those of a run"
        raise NotThere(f"no run of {reader.store.root.address} has a trace {trace_id!r}{hint}")
    return found


def _uses(reader: StoreReader, trace_id: str) -> list[FoundTrace]:
    works = reader.graph.makers("traces")
    found = _matching(index(reader, works), trace_id)
    if len(found) > 1:
        raise NotThere(f"{trace_id!r} is the beginning of several traces: {_list_names(found)}")
    keys = {key for of_trace in found.values() for key in of_trace}
    runs = {run for work in works if work.key in keys for run in work.runs}
    used = [
        (run, lineage)
        for run in reader.store.runs.names()
        if run in runs
        for lineage in reader.history(run).lineages
        if lineage.traces.key in keys
    ]
    made = {lineage.traces.key: lineage.traces for _, lineage in used}
    rows = {key: _row(reader, work, whole) for whole in found for key, work in made.items()}
    return [FoundTrace(run, lineage, rows[lineage.traces.key]) for run, lineage in used]


def outcome_of(reader: StoreReader, trace: FoundTrace) -> dict[str, Any]:
    """Return what the run made of the trace, as `stagecoach why` has it of each run, with its quarantines and notes."""
    frames = reader.frames()
    return {**use_of(frames, trace.lineage, trace.row), "quarantines": quarantines_of(frames, trace.trace_id)} | {
        "notes": notes_of(reader.store, trace_id=trace.trace_id)
    }


def other_runs(trace: FoundTrace) -> list[str]:
    """Return the other runs that use the same rows."""
    return [run for run in trace.lineage.traces.runs if run != trace.run]


def _matching(known: pl.DataFrame, trace_id: str) -> dict[str, list[str]]:
    """Return the ids that are meant, each with the keys of the work that made it."""
    found = known.filter(trace_id=trace_id)
    if found.is_empty() and len(trace_id) >= SHORTEST_PREFIX:
        found = known.filter(pl.col("trace_id").str.starts_with(trace_id))
    grouped = found.group_by("trace_id", maintain_order=True).agg("key").head(NEAREST + 1)
    return dict(grouped.iter_rows())


def _row(reader: StoreReader, work: Work, trace_id: str) -> dict[str, Any]:
    rows = reader.frames().rows([work], "traces").filter(trace_id=trace_id)
    return rows.drop(OWN).collect().row(0, named=True)


def _list_names(found: Mapping[str, Any]) -> str:
    return f"{', '.join(list(found)[:NEAREST])}; give more of it"


def _nowhere(reader: StoreReader, run: str, trace_id: str) -> str:
    others = [use.run for use in _uses(reader, trace_id)]
    known = index(reader, [lineage.traces for lineage in reader.history(run).lineages])["trace_id"]
    near = [] if others else nearest(trace_id, known)
    hint = f"; it is one of {', '.join(dict.fromkeys(others))}" if others else ""
    hint += f"; the nearest ids are {', '.join(near)}" if near else ""
    if has_lost_rows(reader, [lineage.traces for lineage in reader.history(run).lineages], "traces"):
        hint += "; rows of its traces were dropped for their age (`stagecoach maintain --retain`)"
    return f"run {run!r} has no trace {trace_id!r}{hint}"


def trace_use(reader: StoreReader, trace_id: str, run: str = "") -> FoundTrace:
    """Return a trace by its id, or the first eight characters of it or more, as a run uses it.

    Without a run it is as the run has it that computed it. Raises NotThere, with the nearest ids.
    """
    if run:
        return find_trace(reader, run, trace_id)
    found = uses(reader, trace_id)
    # The run that made it may have been removed since; then the first that uses it.
    return next((use for use in found if use.run == use.lineage.traces.computed_by), found[0])


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
