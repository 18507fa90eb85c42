"""Exports rollouts of the store as files that other programs read, and weights as a Hugging Face directory.

A file or directory is written beside its place and put there whole, or not at all.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import polars as pl

from flows.exchange.export_rows import ExportRefused, RolloutChoice, StepRollouts, chosen_rollouts
from flows.reporting.output_files import check_output, write_whole
from flows.runtime.resolve_run import find_policy
from storage.policies.manifest import adapter_base
from storage.read.frames import existing_store
from storage.store import Store
from tasks.exchange.datasets import Pairs, preferences, samples
from tasks.exchange.episodes import Row, compact
from tasks.exchange.traces import MARK, source_of
from tasks.exchange.verifiers_lines import line_of
from tasks.runtime.process_variables import inherited_variables, module_command

Format = Literal["verifiers", "sft", "preferences", "weights"]
LEFT_BEHIND = ("optimizer*", "manifest.json")
"""What of a policy's directory is no part of the model."""


@dataclass(frozen=True)
class ExportResult:
    """What an export wrote."""

    number: int
    """Rows; of weights, files."""
    num_quarantined: int = 0
    """Rollouts left out because they are in quarantine."""


def export(
    form: Format,
    target: Path,
    choice: RolloutChoice,
    policy: str = "",
    store: str = "",
    pairs: Pairs = "extremes",
    force: bool = False,
) -> ExportResult:
    """Write rollouts, or a policy's weights, to a file or directory, whole or not at all.

    `policy` is RUN or RUN:VERSION; empty takes the last policy of the choice's run. Datasets and kept rollouts leave
    those in quarantine out, unless the choice has them. Raises ExportRefused where there is nothing to write,
    OutputRefused for an existing target, NotText, PolicyUnknown, RunUnknown, and QuestionError.
    """
    check_output(target, force)
    source = existing_store(store)
    if form == "weights":
        found = find_policy(source, policy or choice.run)
        if found is None:
            raise ExportRefused("weights: say whose (--policy RUN or RUN:VERSION). Nothing was written.")
        copy_weights(source, found.key, target, force)
        return ExportResult(sum(path.is_file() for path in target.rglob("*")))
    whatever = choice.quarantined or (form == "verifiers" and not choice.kept)
    steps = list(chosen_rollouts(source, replace(choice, quarantined=whatever)))
    left_out = sum(step.num_quarantined for step in steps)
    # All rows before the file: what cannot be a row is refused before anything is begun.
    rows = list(episode_lines(steps) if form == "verifiers" else _dataset_rows(steps, form, pairs))
    if not rows:
        raise ExportRefused(f"there is nothing to export{_hint(form, choice, left_out)}. Nothing was written.")
    if form == "verifiers" and target.suffix == ".parquet":
        raise ExportRefused("verifiers reads JSONL: name a file that ends in .jsonl. Nothing was written.")
    write_whole(target, partial(_write, rows, target.suffix), force)
    return ExportResult(len(rows), left_out)


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


def _dataset_rows(steps: Sequence[StepRollouts], form: Format, pairs: Pairs) -> Iterator[Row]:
    """Yield the rows of a dataset; rollouts that ended with an error are in none."""
    together = "trace_id" if form == "sft" else "group_id"
    for step in steps:
        groups: dict[str, list[tuple[Row, list[Row]]]] = {}
        for trace, messages in step.chosen_traces:
            if trace["error_class"] is None:
                groups.setdefault(trace[together], []).append((trace, messages))
        for group in groups.values():
            sft = (row for trace, messages in group for row in samples(trace, messages))
            rows = sft if form == "sft" else preferences(group, pairs)
            yield from ({**row, "run": step.run, "step": step.step} for row in rows)


def _write(rows: Sequence[Row], suffix: str, draft: Path) -> None:
    if suffix == ".parquet":
        pl.DataFrame(rows, infer_schema_length=None).write_parquet(draft)
        return
    with draft.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(compact(row) + "\n")


def _hint(form: Format, choice: RolloutChoice, num_quarantined: int) -> str:
    """Return which of the conditions may have left nothing."""
    if num_quarantined:
        return f": {num_quarantined} rollouts were left out because they are in quarantine (--quarantined keeps them)"
    if choice.kept or choice.min_reward is not None or choice.sql:
        return ": no rollout meets the conditions (--kept, --min-reward, --sql, --steps)"
    if form == "preferences":
        return ": no group has two answers to one prompt whose rewards differ"
    return f": run {choice.run!r} has no finished rollouts in these steps"


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
