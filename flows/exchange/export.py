"""export: rollouts of a run as files that other programs read, and weights as a Hugging Face directory.

A file or directory is written beside its place and put there whole, or not at all.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import polars as pl
import pyarrow.compute as pc

from flows.queries.conditions import BadCondition, matching_traces
from flows.queries.step_history import StepHistory
from flows.queries.views import relations
from flows.reporting.output_files import check_output, write_whole
from flows.runtime.resolve_run import find_policy
from storage.policies.manifest import adapter_base
from storage.read.frames import Frames, existing_store
from storage.read.lineage import Graph, Work
from storage.read.query_limits import OF_MACHINE
from storage.store import Store
from tasks.arrays.columns import texts
from tasks.exchange.datasets import samples
from tasks.exchange.episodes import TRAIN, Row, compact
from tasks.exchange.traces import MARK, source_of
from tasks.exchange.verifiers_lines import line_of
from tasks.inference.trace_rows.images import restore_images
from tasks.runtime.process_variables import inherited_variables, module_command
from tasks.runtime.weights_sum import SUMS_FILE
from tasks.stages import STREAM_ASSIGNMENT

Format = Literal["verifiers", "sft", "weights"]
LEFT_BEHIND = ("optimizer*", "manifest.json", SUMS_FILE)
"""What of a policy's directory is no part of the model."""
ASSIGNMENTS = ("assignment", "evaluation_assignment", STREAM_ASSIGNMENT)
"""How inputs of rollouts begin that are assignments; a step of a stream has groups of several."""


class ExportRefused(ValueError):
    """Something is in the way of what was to be written, or there is nothing to write."""


@dataclass(frozen=True)
class RolloutChoice:
    """The rollouts of a run that are exported, with the rewards and verdicts that they have there."""

    run: str
    where: str = ""
    """Condition on rollouts, as in the viewer's search; empty for all."""
    held_out: bool = False
    """Whether attempts at held-out examples are included; training on those would spoil every evaluation."""
    quarantined: bool = False
    """Whether rollouts in quarantine are included."""


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
    chosen: Set[str]
    """Ids of the chosen traces."""
    num_quarantined: int
    """Traces that would have been chosen, were they not in quarantine."""


@dataclass(frozen=True)
class ExportResult:
    """What an export wrote."""

    number: int
    """Rows; of weights, files."""
    num_quarantined: int = 0
    """Rollouts left out because they are in quarantine."""


def export(
    form: Format, target: Path, choice: RolloutChoice, policy: str = "", store: str = "", force: bool = False
) -> ExportResult:
    """Write rollouts, or a policy's weights, to a file or directory, whole or not at all.

    `policy` is RUN or RUN:VERSION; empty takes the last policy of the choice's run. Raises ExportRefused where there is
    nothing to write or `where` is no condition, OutputRefused for an existing target, NotText, PolicyUnknown and
    RunUnknown.
    """
    check_output(target, force)
    source = existing_store(store)
    if form == "weights":
        found = find_policy(source, policy or choice.run)
        if found is None:
            raise ExportRefused("weights: say whose (--policy RUN or RUN:VERSION). Nothing was written.")
        copy_weights(source, found.key, target, force)
        return ExportResult(sum(path.is_file() for path in target.rglob("*")))
    steps = list(chosen_rollouts(source, choice))
    left_out = sum(step.num_quarantined for step in steps)
    # All rows before the file: what cannot be a row is refused before anything is begun.
    rows = list(episode_lines(steps) if form == "verifiers" else _dataset_rows(steps))
    if not rows:
        raise ExportRefused(
            f"there is nothing to export of run {choice.run!r}: no finished rollout meets the condition (--where); "
            f"{left_out} rollouts were left out because they are in quarantine (--quarantined keeps them). "
            "Nothing was written."
        )
    if form == "verifiers" and target.suffix == ".parquet":
        raise ExportRefused("verifiers reads JSONL: name a file that ends in .jsonl. Nothing was written.")
    write_whole(target, partial(_write, rows, target.suffix), force)
    return ExportResult(len(rows), left_out)


def chosen_rollouts(store: Store, choice: RolloutChoice) -> Iterator[StepRollouts]:
    """Yield the steps of a run that have chosen rollouts, in order. Raises RunUnknown and ExportRefused."""
    store.runs.events(choice.run)
    graph = Graph(store.counted_entries())
    try:
        requested = {*matching_traces(Frames(store, relations).run(choice.run), choice.where, OF_MACHINE)[0]}
    except BadCondition as error:
        raise ExportRefused(f"--where: {error}\nNothing was written.") from error
    unfit = frozenset() if choice.quarantined else store.quarantines.reasons(store.quarantines.ids()).keys()
    sources: dict[str, tuple[Work, Work]] = {}
    # The last to set a key counts: rollouts scored more than once are as they were trained, or scored last.
    for lineage in sorted(
        StepHistory(graph, choice.run).lineages, key=lambda one: (one.updates is not None, one.traces.age)
    ):
        if choice.held_out or lineage.for_training:
            sources |= {source.key: (source, lineage.traces) for source in graph.origins(lineage.traces, "messages")}

    @cache
    def examples_of(key: str) -> dict[tuple[str, str], Row]:
        rows = _rows(store, graph.works[key], "examples")
        return {(row["environment"], row["example_id"]): row for row in rows}

    for source, scored in sorted(sources.values(), key=lambda pair: (pair[0].step, pair[0].age)):
        if not source.finished:
            continue
        sampled = store.read(source.slices_of("traces"), ["trace_id"])["trace_id"]
        if requested.isdisjoint(texts(sampled)):
            continue
        by_id = examples_of(source.inputs["examples"])
        # Scoring again is of all rollouts of a step, which may have been sampled in several batches.
        traces = store.read(scored.slices_of("traces"))
        traces = traces.filter(pc.is_in(traces["trace_id"], value_set=sampled.combine_chunks()))
        chosen = {
            row["trace_id"]
            for row in traces.select(["trace_id", "environment", "example_id"]).to_pylist()
            if row["trace_id"] in requested
            and (choice.held_out or by_id[row["environment"], row["example_id"]]["split"] == TRAIN)
        }
        if chosen:
            assigned = [graph.works[key] for name, key in source.inputs.items() if name.startswith(ASSIGNMENTS)]
            images, messages = source.slices_of("images"), store.read(source.slices_of("messages"))
            # Other programs read pictures within messages; the store has them once, in a table of their own.
            tables = restore_images(traces, messages, store.read(images) if images else None)
            by_trace: dict[str, list[Row]] = {}
            for row in sorted(tables["messages"].to_pylist(), key=lambda row: row["message"]):
                by_trace.setdefault(row["trace_id"], []).append(row)
            yield StepRollouts(
                run=choice.run,
                step=source.step,
                traces=tuple(tables["traces"].to_pylist()),
                messages=by_trace,
                assignments={
                    row["assignment_id"]: row for work in assigned for row in _rows(store, work, "assignments")
                },
                examples=by_id,
                chosen=chosen - unfit,
                num_quarantined=len(chosen & unfit),
            )


def _rows(store: Store, work: Work, table: str) -> list[Row]:
    return list(store.read(work.slices_of(table)).to_pylist())


def episode_lines(steps: Sequence[StepRollouts]) -> Iterator[Row]:
    """Yield the lines of a verifiers file: every episode with a chosen trace, whole.

    What was read from such a file is the line that it was; what our own runs sampled carries a block `stagecoach`.
    """
    read: dict[tuple[str, int, int], list[tuple[int, Row, list[Row]]]] = {}
    for step in steps:
        episodes: dict[str, list[Row]] = {}
        for row in step.traces:
            episodes.setdefault(row["episode_id"], []).append(row)
        for rows in episodes.values():
            if not any(row["trace_id"] in step.chosen for row in rows):
                continue
            # Conversations were no lines of verifiers when they were read, so they are written as ours are.
            mark = json.loads(rows[0]["record"]).get(MARK)
            if mark is None or "conversation" in mark:
                example = step.examples[rows[0]["environment"], rows[0]["example_id"]]
                assignment = step.assignments[rows[0]["assignment_id"]]
                yield line_of(step.run, step.step, rows, step.messages, assignment, example)
                continue
            for row in rows:
                mark = json.loads(row["record"])[MARK]
                place = (step.run, mark["file"], mark["line"])
                read.setdefault(place, []).append((mark["at"], row, step.messages.get(row["trace_id"], [])))
    for place in sorted(read):
        yield _line_as_read([(row, messages) for _, row, messages in sorted(read[place], key=lambda one: one[0])])


def _line_as_read(traces: Sequence[tuple[Row, list[Row]]]) -> Row:
    outer = json.loads(traces[0][0]["record"])[MARK].get("episode")
    found = [source_of(row, messages) for row, messages in traces if "nodes" in json.loads(row["record"])]
    return found[0] if outer is None else {**outer, "traces": found}


def _dataset_rows(steps: Sequence[StepRollouts]) -> Iterator[Row]:
    """Yield the rows of a dataset; rollouts that ended with an error are in none."""
    for step in steps:
        for trace in step.traces:
            if trace["trace_id"] in step.chosen and trace["error_class"] is None:
                for row in samples(trace, step.messages.get(trace["trace_id"], [])):
                    yield {**row, "run": step.run, "step": step.step}


def _write(rows: Sequence[Row], suffix: str, draft: Path) -> None:
    if suffix == ".parquet":
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(draft)
        return
    with draft.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(compact(row) + "\n")


def copy_weights(store: Store, policy_key: str, target: Path, force: bool) -> None:
    """Write a policy's weights, config and tokenizer to a directory, as Hugging Face's libraries read them.

    An adapter is merged into the weights that it is laid over.
    """
    source = store.policies.directory(policy_key)
    base = adapter_base(source)
    below = store.policies.directory(base) if base else None

    def write(draft: Path) -> None:
        if below:
            _merge(below, source, draft)
        else:
            shutil.copytree(source, draft, ignore=shutil.ignore_patterns(*LEFT_BEHIND))

    write_whole(target, write, force)


def _merge(base: Path, adapter: Path, draft: Path) -> None:
    """Write merged weights in a process of its own: this one does not load torch."""
    argv = module_command("tasks.learner.adapter_tools", "merge", str(base), str(adapter), str(draft))
    done = subprocess.run(argv, env=inherited_variables(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExportRefused(
            f"the adapter could not be merged into its base: {done.stderr.strip()[-2000:]}\nNothing was written. "
            f"The policy is safe in the store, as an adapter that peft reads: {adapter}"
        )
