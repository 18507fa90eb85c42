"""Chooses the rollouts to export: those of a run, those that a question names, or both.

Where runs share rollouts, it says whose rewards and verdicts count.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import pyarrow as pa

from flows.queries.step_history import StepHistory
from flows.queries.views import relations
from storage.read.frames import Frames
from storage.read.lineage import Graph, Work
from storage.read.query_limits import OF_MACHINE
from storage.read.sql import ask
from storage.refs import Entry
from storage.store import Store
from tasks.arrays.columns import texts
from tasks.exchange.episodes import TRAIN, Row
from tasks.inference.trace_rows.images import restore_images
from tasks.stages import STREAM_ASSIGNMENT


class ExportRefused(ValueError):
    """Something is in the way of what was to be written, or there is nothing to write."""


@dataclass(frozen=True)
class RunRollouts:
    """Rollouts as one run has them."""

    sampled: Entry
    """What made the traces."""
    scored: Entry
    """What has the run's rewards: that of scoring the traces again, where the run did."""
    filtered: Entry | None
    """What has the run's verdicts; None where the run has not filtered them."""

    @property
    def run(self) -> str:
        """The run whose rewards and verdicts these are."""
        return self.sampled.run


def rollouts_by_run(store: Store, run: str = "", held_out: bool = False) -> list[list[RunRollouts]]:
    """Return the finished work that made traces, each as the runs that share it have it; of one run, if it is named.

    Attempts at held-out examples are among it only if asked for.
    """
    found: dict[str, list[RunRollouts]] = {}
    graph = Graph(store.counted_entries())
    for name in [run] if run else sorted({name for work in graph.works.values() for name in work.runs}):
        own = _of_run(StepHistory(graph, name), held_out)
        for each in sorted(own, key=lambda each: (each.sampled.step, each.sampled.finished_at)):
            found.setdefault(each.sampled.key, []).append(each)
    return list(found.values())


def common_rollouts(ways: Sequence[RunRollouts], kept: bool) -> RunRollouts:
    """Return the way in which runs have certain rollouts, where they all agree: that of the run that computed them.

    `kept` asks that they agree on the verdicts as well. Raises ExportRefused where they differ.
    """
    filtered = [way for way in ways if kept and way.filtered] or ways
    # Runs that share scores and verdicts agree, whichever of them is named.
    variants = {(way.scored.key, way.filtered.key if kept and way.filtered else "") for way in filtered}
    if len(variants) > 1:
        what = "rewards or verdicts" if kept else "rewards"
        raise ExportRefused(
            f"the rollouts of step {ways[0].sampled.step} have other {what} in each of the runs "
            f"{', '.join(way.run for way in filtered)}. Nothing was written. Name the run whose {what} count "
            f"(stagecoach export RUN --sql ...), or let the question answer with the column `run` as well."
        )
    return next((way for way in filtered if any(piece.run == way.run for piece in way.sampled.outputs)), filtered[0])


def _of_run(history: StepHistory, held_out: bool) -> list[RunRollouts]:
    """Return the finished rollouts of a run; scored again more than once, they are as they were trained, or last."""

    def own(work: Work) -> Entry:
        return replace(work.entry, run=history.run)

    found: dict[str, RunRollouts] = {}
    # The last to set a key counts: what was trained on wins over what was not.
    for lineage in sorted(history.lineages, key=lambda each: (each.updates is not None, each.traces.age)):
        if held_out or lineage.for_training:
            verdicts = own(lineage.verdicts) if lineage.verdicts else None
            for sampled in history.own.sources(lineage.traces, "traces") or [lineage.traces]:
                if sampled.finished:
                    found[sampled.key] = RunRollouts(own(sampled), own(lineage.traces), verdicts)
    return list(found.values())


@dataclass(frozen=True)
class RolloutChoice:
    """Which rollouts; what is empty or None leaves nothing out."""

    run: str = ""
    sql: str = ""
    first_step: int = 0
    last_step: int | None = None
    """The step before which the export ends."""
    kept: bool = False
    """Only traces that the filters kept."""
    min_reward: float | None = None
    held_out: bool = False
    """Whether attempts at held-out examples are among them; training on those would spoil every evaluation."""
    quarantined: bool = False
    """Whether rollouts in quarantine are among them."""

    def holds(self, step: int) -> bool:
        """Tell whether a step is one of those chosen."""
        return self.first_step <= step and (self.last_step is None or step < self.last_step)


@dataclass(frozen=True)
class StepRollouts:
    """The rollouts of one step, and which of them were chosen."""

    run: str
    step: int
    traces: tuple[Row, ...]
    messages: Mapping[str, list[Row]]
    """By trace, in order of message."""
    assignments: Mapping[str, Row]
    examples: Mapping[tuple[str, str], Row]
    chosen: frozenset[str] = frozenset()
    """Ids of the chosen traces."""
    num_quarantined: int = 0
    """Traces that would have been chosen, were they not in quarantine."""

    @property
    def chosen_traces(self) -> list[tuple[Row, list[Row]]]:
        """The chosen traces with their messages."""
        chosen = [row for row in self.traces if row["trace_id"] in self.chosen]
        return [(row, self.messages.get(row["trace_id"], [])) for row in chosen]


def chosen_rollouts(store: Store, choice: RolloutChoice) -> Iterator[StepRollouts]:
    """Yield the steps that have chosen rollouts, in order of run and step.

    Rewards and verdicts are those of the run that is named, by the choice or by the answer's column `run`; where a
    replay scored traces again, its rewards are the new ones. Raises ExportRefused for a question without a column
    `trace_id`, and where no run is named and runs differ about a rollout, QuestionError for one that is no question,
    RunUnknown.
    """
    unfit = frozenset() if choice.quarantined else frozenset(store.quarantines.reasons(store.quarantines.ids()))
    for run, wanted in _wanted_traces(store, choice):
        if run:
            store.runs.events(run)
        for ways in rollouts_by_run(store, run, choice.held_out):
            if choice.holds(ways[0].sampled.step):
                yield from _of_entry(store, ways, choice, wanted, unfit)


def _wanted_traces(store: Store, choice: RolloutChoice) -> list[tuple[str, Set[str] | None]]:
    """Return the runs to look at, an empty one for all, each with the ids of the traces that are wanted."""
    if not choice.sql:
        return [(choice.run, None)]
    answer = ask(Frames(store, relations), choice.sql, bounds=OF_MACHINE)
    if "trace_id" not in answer.column_names:
        raise ExportRefused(
            f"--sql: the answer has the columns {', '.join(answer.column_names)}; it needs `trace_id`, which says what "
            "is exported. Nothing was written."
        )
    traces = texts(answer["trace_id"].cast(pa.string()))
    if choice.run or "run" not in answer.column_names:
        return [(choice.run, set(traces))]
    by_run: dict[str, set[str]] = {}
    for run, trace_id in zip(texts(answer["run"].cast(pa.string())), traces, strict=True):
        by_run.setdefault(run, set()).add(trace_id)
    return sorted(by_run.items())


def _of_entry(
    store: Store, ways: Sequence[RunRollouts], choice: RolloutChoice, wanted: Set[str] | None, unfit: Set[str]
) -> Iterator[StepRollouts]:
    """Yield what is chosen of the traces of one stage result."""
    ids = texts(store.read(ways[0].sampled.slices("traces"), ["trace_id"])["trace_id"])
    # Ids alone are cheap: of most work a question names nothing.
    if wanted is not None and wanted.isdisjoint(ids):
        return
    work = common_rollouts(ways, choice.kept)
    whole = _step(store, work)
    keep = _kept_traces(store, work) if choice.kept else None
    chosen = {
        row["trace_id"]
        for row in whole.traces
        if (wanted is None or row["trace_id"] in wanted)
        and (keep is None or row["trace_id"] in keep)
        and (choice.min_reward is None or (row["reward"] is not None and row["reward"] >= choice.min_reward))
        and (choice.held_out or whole.examples[row["environment"], row["example_id"]]["split"] == TRAIN)
    }
    if chosen:
        yield replace(whole, chosen=frozenset(chosen - unfit), num_quarantined=len(chosen & unfit))


def _kept_traces(store: Store, work: RunRollouts) -> set[str]:
    """Return the ids of the traces that the filters kept."""
    if work.filtered is None:
        raise ExportRefused(
            f"--kept: run {work.run!r} has not filtered the rollouts of step {work.sampled.step}, so none of them is "
            f"known to be kept. Nothing was written. Export them without --kept, or name a replay that filters them."
        )
    rows = store.read(work.filtered.slices("verdicts"), ["trace_id", "keep"])
    return {row["trace_id"] for row in rows.to_pylist() if row["keep"]}


def _step(store: Store, work: RunRollouts) -> StepRollouts:
    """Return the rollouts of one stage result, none of them chosen yet."""
    entry = work.sampled
    images = entry.slices("images")
    traces, sampled = store.read(work.scored.slices("traces")), store.read(entry.slices("messages"))
    # Others read pictures within messages; the store has them once, in a table of their own.
    whole = restore_images(traces, sampled, store.read(images) if images else None)
    messages: dict[str, list[Row]] = {}
    for row in whole["messages"].to_pylist():
        messages.setdefault(row["trace_id"], []).append(row)
    assigned = _inputs(store, entry, "assignments", ("assignment", "evaluation_assignment"))
    # A step that took its groups from a stream took some that other steps' assignments name.
    for name in entry.inputs:
        if name.startswith(STREAM_ASSIGNMENT):
            assigned += _inputs(store, entry, "assignments", (name,))
    examples = _inputs(store, entry, "examples", ("examples",))
    return StepRollouts(
        run=entry.run,
        step=entry.step,
        traces=tuple(whole["traces"].to_pylist()),
        messages={name: sorted(rows, key=lambda row: row["message"]) for name, rows in messages.items()},
        assignments={row["assignment_id"]: row for row in assigned},
        examples={(row["environment"], row["example_id"]): row for row in examples},
    )


def _inputs(store: Store, entry: Entry, table: str, names: Sequence[str]) -> list[Row]:
    key = next(entry.inputs[name] for name in names if name in entry.inputs)
    made = store.ledger.find(key, run=entry.run)
    assert made is not None, f"{entry.stage} {entry.key} names {key}, which is not in the ledger"
    rows: list[Row] = store.read(made.slices(table)).to_pylist()
    return rows
