"""chosen_rollouts: the rollouts to export, those of a run, those that a query names, or both.

Where runs share rollouts, it decides whose rewards and verdicts count.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from flows.queries.step_history import StepHistory, StepLineage
from flows.queries.views import relations
from storage.read.frames import Frames
from storage.read.lineage import Graph, Work
from storage.read.query_limits import OF_MACHINE
from storage.read.sql import ask
from storage.store import Store
from tasks.arrays.columns import texts
from tasks.exchange.episodes import TRAIN, Row
from tasks.inference.trace_rows.images import restore_images
from tasks.stages import STREAM_ASSIGNMENT

ASSIGNMENTS = ("assignment", "evaluation_assignment", STREAM_ASSIGNMENT)
"""How inputs of rollouts begin that are assignments; a step of a stream has groups of several."""


class ExportRefused(ValueError):
    """Something is in the way of what was to be written, or there is nothing to write."""


@dataclass(frozen=True)
class RolloutChoice:
    """Which rollouts; what is empty or None excludes nothing."""

    run: str = ""
    sql: str = ""
    first_step: int = 0
    last_step: int | None = None
    """The step before which the export ends."""
    kept: bool = False
    """Only traces that the filters kept."""
    min_reward: float | None = None
    held_out: bool = False
    """Whether attempts at held-out examples are included; training on those would spoil every evaluation."""
    quarantined: bool = False
    """Whether rollouts in quarantine are included."""

    def has_step(self, step: int) -> bool:
        """Return whether the choice includes a step."""
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
    chosen: Set[str] = frozenset()
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

    Rewards and verdicts are those of the run that the choice names, or the column `run` of the query's answer; where a
    replay scored traces again, its rewards are the new ones. Raises ExportRefused for a query without a column
    `trace_id`, and where no run is named and runs differ about a rollout, QuestionError for one that is no query,
    RunUnknown.
    """
    graph = Graph(store.counted_entries())
    quarantined = frozenset() if choice.quarantined else store.quarantines.reasons(store.quarantines.ids()).keys()
    for run, trace_ids in _requested_traces(store, choice):
        if run:
            store.runs.events(run)  # raises RunUnknown
        for source, lineages in _shared_lineages(graph, run, choice):
            sampled = store.read(source.slices_of("traces"), ["trace_id"])["trace_id"]
            # Ids alone are cheap: of most batches a query names nothing.
            if trace_ids is None or not trace_ids.isdisjoint(texts(sampled)):
                lineage = _agreed_lineage(source, lineages, choice.kept)
                traces = store.read(lineage.traces.slices_of("traces"))
                # Scoring again is of all rollouts of a step, which may have been sampled in several batches.
                traces = traces.filter(pc.is_in(traces["trace_id"], value_set=sampled.combine_chunks()))
                step = _step_rollouts(store, graph, source, lineage.run, traces)
                chosen = {row["trace_id"] for row in step.traces if trace_ids is None or row["trace_id"] in trace_ids}
                chosen &= set(_chosen_traces(store, step, lineage, choice))
                if chosen:
                    yield replace(step, chosen=chosen - quarantined, num_quarantined=len(chosen & quarantined))


def _requested_traces(store: Store, choice: RolloutChoice) -> list[tuple[str, Set[str] | None]]:
    """Return the runs to read, an empty name for all, each with the ids of its requested traces, None for all."""
    if not choice.sql:
        return [(choice.run, None)]
    answer = ask(Frames(store, relations), choice.sql, bounds=OF_MACHINE)
    if "trace_id" not in answer.column_names:
        raise ExportRefused(
            f"--sql: the answer has the columns {', '.join(answer.column_names)}; it needs `trace_id`, which says what "
            "is exported. Nothing was written."
        )
    trace_ids = texts(answer["trace_id"].cast(pa.string()))
    if choice.run or "run" not in answer.column_names:
        return [(choice.run, set(trace_ids))]
    by_run: dict[str, set[str]] = {}
    for run, trace_id in zip(texts(answer["run"].cast(pa.string())), trace_ids, strict=True):
        by_run.setdefault(run, set()).add(trace_id)
    return sorted(by_run.items())


def _shared_lineages(graph: Graph, run: str, choice: RolloutChoice) -> list[tuple[Work, list[StepLineage]]]:
    """Return each batch of sampled rollouts with what it went through in the runs that share it, or in one run."""
    found: dict[str, tuple[Work, list[StepLineage]]] = {}
    for name in [run] if run else sorted({name for work in graph.works.values() for name in work.runs}):
        own: dict[str, tuple[Work, StepLineage]] = {}
        # The last to set a key counts: rollouts scored more than once are as they were trained, or scored last.
        for lineage in sorted(
            StepHistory(graph, name).lineages, key=lambda one: (one.updates is not None, one.traces.age)
        ):
            if choice.held_out or lineage.for_training:
                for source in graph.origins(lineage.traces, "messages"):
                    own[source.key] = source, lineage
        for source, lineage in sorted(own.values(), key=lambda pair: (pair[0].step, pair[0].age)):
            if source.finished and choice.has_step(source.step):
                found.setdefault(source.key, (source, []))[1].append(lineage)
    return list(found.values())


def _agreed_lineage(source: Work, lineages: Sequence[StepLineage], kept: bool) -> StepLineage:
    """Return what all runs agree on that share rollouts: of the run that computed them, if it is among these.

    With `kept` they must agree on the verdicts as well. Raises ExportRefused where they differ.
    """
    lineages = [one for one in lineages if kept and one.verdicts] or lineages
    # Runs that share scores and verdicts agree, whichever of them is named.
    if len({(one.traces.key, one.verdicts.key if kept and one.verdicts else "") for one in lineages}) > 1:
        what = "rewards or verdicts" if kept else "rewards"
        raise ExportRefused(
            f"the rollouts of step {source.step} have other {what} in each of the runs "
            f"{', '.join(one.run for one in lineages)}. Nothing was written. Name the run whose {what} count "
            f"(stagecoach export RUN --sql ...), or let the question answer with the column `run` as well."
        )
    return next((one for one in lineages if one.run == source.computed_by), lineages[0])


def _chosen_traces(store: Store, step: StepRollouts, lineage: StepLineage, choice: RolloutChoice) -> Iterator[str]:
    """Yield the ids of the traces of a step that meet the conditions of a choice. Raises ExportRefused."""
    kept: Set[str] = {row["trace_id"] for row in step.traces}
    if choice.kept and lineage.verdicts is None:
        raise ExportRefused(
            f"--kept: run {step.run!r} has not filtered the rollouts of step {step.step}, so none of them is known to "
            f"be kept. Nothing was written. Export them without --kept, or name a replay that filters them."
        )
    if choice.kept and lineage.verdicts:
        verdicts = store.read(lineage.verdicts.slices_of("verdicts"), ["trace_id", "keep"])
        kept = {*texts(verdicts.filter(verdicts["keep"])["trace_id"])}
    for row in step.traces:
        example = step.examples[row["environment"], row["example_id"]]
        if (
            row["trace_id"] in kept
            and (choice.min_reward is None or (row["reward"] is not None and row["reward"] >= choice.min_reward))
            and (choice.held_out or example["split"] == TRAIN)
        ):
            yield row["trace_id"]


def _step_rollouts(store: Store, graph: Graph, source: Work, run: str, traces: pa.Table) -> StepRollouts:
    """Return a batch of sampled rollouts with the rows that it was sampled for, none of them chosen yet."""

    def rows(work: Work, table: str) -> list[Row]:
        return list(store.read(work.slices_of(table)).to_pylist())

    images, messages = source.slices_of("images"), store.read(source.slices_of("messages"))
    # Other programs read pictures within messages; the store has them once, in a table of their own.
    tables = restore_images(traces, messages, store.read(images) if images else None)
    by_trace: dict[str, list[Row]] = {}
    for row in sorted(tables["messages"].to_pylist(), key=lambda row: row["message"]):
        by_trace.setdefault(row["trace_id"], []).append(row)
    assigned = [graph.works[key] for name, key in source.inputs.items() if name.startswith(ASSIGNMENTS)]
    examples = rows(graph.works[source.inputs["examples"]], "examples")
    return StepRollouts(
        run=run,
        step=source.step,
        traces=tuple(tables["traces"].to_pylist()),
        messages=by_trace,
        assignments={row["assignment_id"]: row for work in assigned for row in rows(work, "assignments")},
        examples={(row["environment"], row["example_id"]): row for row in examples},
    )
