"""Import of traces: rollouts that were made elsewhere become the examples, assignments and traces of a run.

Reads nothing but its source; writes examples, then assignments, then traces, messages and their images with their
tensors, as if they had been sampled.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import pyarrow as pa

from configs.run import View
from configs.sections import ModelConfig
from storage.schemas.stage_tables import ASSIGNMENTS, EXAMPLES, MESSAGES, TRACES
from tasks.arrays.columns import texts, with_column
from tasks.arrays.images import TYPES
from tasks.exchange.episodes import Episode, LineProblem, Row, compact, digest
from tasks.exchange.traces import MARK, source_of
from tasks.inference.engine.model_info import model_directory
from tasks.inference.trace_rows.demonstrations import demonstration_renderer
from tasks.inference.trace_rows.image_tensors import tensors_of
from tasks.inference.trace_rows.images import extract_images
from tasks.inference.trace_rows.rows import canonical_json
from tasks.runtime.prefect_task import as_task
from tasks.runtime.stage import Attempt, Stage, Tables


@dataclass(frozen=True)
class ImportedRollouts:
    """What an import brings in: the rows of every step, ready to be written."""

    example_rows: tuple[Row, ...]
    steps: dict[int, tuple[Episode, ...]]
    """Episodes by step, each with its assignment."""
    model: ModelConfig | None = None
    """The model whose processor makes tensors of images; none where no model was named."""

    def examples(self) -> pa.Table:
        """Return the examples that were tried, in the EXAMPLES schema."""
        return pa.Table.from_pylist(list(self.example_rows), schema=EXAMPLES.arrow)

    def assignments(self, step: int) -> pa.Table:
        """Return the assignments of a step, in the ASSIGNMENTS schema, groups and members in their order."""
        rows = [episode.assignment for episode in self.steps[step] if episode.assignment]
        rows.sort(key=lambda row: (int(row["group_id"].rpartition("-")[2]), row["member"]))
        return pa.Table.from_pylist(rows, schema=ASSIGNMENTS.arrow)

    def rows(self, step: int) -> tuple[pa.Table, pa.Table]:
        """Return the traces and the messages of a step, in the TRACES and the MESSAGES schema."""
        traces = [row for episode in self.steps[step] for row in episode.traces]
        messages = [row for episode in self.steps[step] for row in episode.messages]
        return pa.Table.from_pylist(traces, schema=TRACES.arrow), pa.Table.from_pylist(messages, schema=MESSAGES.arrow)

    def groups(self) -> dict[str, int]:
        """Return how many groups there are, of more than one rollout, and with rewards that differ."""
        rewards: dict[str, set[float]] = {}
        sizes: Counter[str] = Counter()
        for episode in (episode for step in self.steps.values() for episode in step):
            group = episode.traces[0]["group_id"]
            sizes[group] += 1
            found = (row["reward"] for row in episode.traces if row["trainable"])
            rewards.setdefault(group, set()).update(reward for reward in found if reward is not None)
        several, differ = (size > 1 for size in sizes.values()), (len(found) > 1 for found in rewards.values())
        return {"groups": len(sizes), "of more than one rollout": sum(several), "with differing rewards": sum(differ)}


@dataclass(frozen=True)
class ImportInputs:
    """The imported rollouts, and the step that is written of them."""

    source: ImportedRollouts
    step: int

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        return cls(attempt.parameters, attempt.step)


def imported_examples(inputs: ImportInputs, config: View) -> Tables:
    """List the examples that the imported rollouts tried."""
    return {"examples": inputs.source.examples()}


def imported_assignments(inputs: ImportInputs, config: View) -> Tables:
    """Say which examples a step tried, in which groups."""
    return {"assignments": inputs.source.assignments(inputs.step)}


def trace_import(inputs: ImportInputs, config: View) -> Tables:
    """Bring in the rollouts of a step; they answer its assignments."""
    source, step = inputs.source, inputs.step
    made = extract_images(*source.rows(step))
    if "images" not in made or source.model is None or not (tensors := tensors_of(made["images"], source.model)):
        return made
    return made | tensors | {"traces": _with_token_types(made["traces"], source.model)}


def _with_token_types(traces: pa.Table, model: ModelConfig) -> pa.Table:
    """Return traces whose records say which tokens stand for images, by the model's renderer where need be."""
    records = [json.loads(text) for text in texts(traces["record"])]
    if all(record.get(TYPES) for record in records):
        return traces
    render = demonstration_renderer(model_directory(model.tokenizer), model.renderer, model.renderer_settings)
    known = {TYPES: getattr(render, "token_types", None) or {}}
    changed = [compact(record if record.get(TYPES) else record | known) for record in records]
    return with_column(traces, "record", pa.array(changed, pa.string()))


EXAMPLES_STAGE = Stage(
    name="examples",
    version=2,
    reads=(),
    writes=("examples",),
    sections=(),
    read_inputs=ImportInputs.read,
    function=imported_examples,
)
ASSIGNMENT_STAGE = Stage(
    name="assignment",
    version=2,
    reads=("examples",),
    writes=("assignments",),
    sections=(),
    read_inputs=ImportInputs.read,
    function=imported_assignments,
)
STAGE = Stage(
    name="import",
    version=3,
    reads=("assignments", "examples"),
    writes=("traces", "messages", "images", "image_tensors"),
    optional=("images", "image_tensors"),
    sections=(),
    read_inputs=ImportInputs.read,
    function=trace_import,
)
examples_task = as_task(EXAMPLES_STAGE)
assignment_task = as_task(ASSIGNMENT_STAGE)
task = as_task(STAGE)


def split_repeated(episodes: Sequence[Episode]) -> tuple[list[Episode], list[LineProblem]]:
    """Return the episodes whose traces are there for the first time, and the lines of the others as problems."""
    seen: dict[str, Episode] = {}
    kept, problems = [], []
    for episode in episodes:
        again = next((row["trace_id"] for row in episode.traces if row["trace_id"] in seen), None)
        if again is None:
            kept.append(episode)
            seen |= {row["trace_id"]: episode for row in episode.traces}
            continue
        before, origin = seen[again].origin, episode.origin
        detail = f"{again}, first in {before.file}, line {before.line}"
        problems.append(LineProblem(origin.file, origin.line, "a trace is there twice", detail))
    return kept, problems


def arrange(episodes: Sequence[Episode]) -> ImportedRollouts:
    """Return the episodes by step and group, in the order of the files.

    They go to the step that the file names, 0 where it names none; within a step, episodes of one group of the file,
    or else of one example, are a group. Lines that are traces of one episode are one.
    """
    members: Counter[str] = Counter()
    num_groups: Counter[int] = Counter()
    slots: dict[tuple[object, ...], str] = {}
    steps: dict[int, list[Episode]] = {}
    examples: dict[tuple[str, str], Row] = {}
    for episode in _join_episodes(episodes):
        known = _with_example(episode, examples)
        step = known.step or 0
        # The file's group is split by example: a baseline compares attempts at one example.
        key = (step, known.group, known.environment, known.example_id)
        if key not in slots:
            slots[key] = f"{step}-{num_groups[step]}"
            num_groups[step] += 1
        assignment = _assignment(known, slots[key], members[slots[key]])
        members[slots[key]] += 1
        steps.setdefault(step, []).append(_with_assignment(known, assignment, step))
    ordered = {step: tuple(steps[step]) for step in sorted(steps)}
    return ImportedRollouts(tuple(examples.values()), ordered)


def _join_episodes(episodes: Sequence[Episode]) -> list[Episode]:
    """Make one episode of lines that are traces of the same one, at the place of the first."""
    found: dict[object, Episode] = {}
    for number, episode in enumerate(episodes):
        # A line that has no id of its episode goes by its trace's: it is one by itself.
        by_id = episode.episode_id != episode.traces[0]["trace_id"]
        key = (episode.environment, episode.step, episode.episode_id) if by_id else number
        before = found.get(key)
        if before is None:
            found[key] = episode
        else:
            traces, messages = [*before.traces, *episode.traces], [*before.messages, *episode.messages]
            found[key] = replace(before, traces=traces, messages=messages)
    return list(found.values())


def _with_example(episode: Episode, examples: dict[tuple[str, str], Row]) -> Episode:
    """Add the episode's example; one with another task under an id that is taken gets an id with a number."""
    example_id, number = episode.example_id, 1
    while True:
        row = {"environment": episode.environment, "example_id": example_id}
        row |= {"split": episode.split, "task": episode.task}
        if examples.setdefault((episode.environment, example_id), row)["task"] == episode.task:
            return replace(episode, example_id=example_id)
        number += 1
        example_id = f"{episode.example_id}#{number}"


def _assignment(episode: Episode, group: str, member: int) -> Row:
    of_episode = {name: getattr(episode, name) for name in ("environment", "example_id", "seed")}
    return {"assignment_id": f"{group}/{member}", "group_id": group, "member": member, **of_episode}


def _with_assignment(episode: Episode, assignment: Row, step: int) -> Episode:
    """Fill in what the assignment decides; what a trace's own columns say of its policy stays."""
    names = ("assignment_id", "group_id", "environment", "example_id")
    decided = {name: assignment[name] for name in names} | {"episode_id": episode.episode_id}
    unknown = {"policy_version": step, "staleness": 0}
    # In this order: what a trace says of its policy wins over what is assumed, the assignment over both.
    traces = [{**unknown, **row, **decided} for row in episode.traces]
    return replace(episode, assignment=assignment, traces=traces)


UNIQUE = re.compile(r"[0-9a-f]{24,}")
"""Ids by chance or by content, of 96 bits or more: nobody else has them. verifiers makes such."""
ID_LENGTH = 16
"""Hex characters of the content's digest in an id."""


def with_unique_ids(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes with ids of traces that no other rollout has.

    An id such as `0` is unique within its file alone; it goes behind a digest of the trace's content. What the file
    said is kept in the trace's record.
    """
    return [_with_unique_ids(episode) for episode in episodes]


def _with_unique_ids(episode: Episode) -> Episode:
    short = [row for row in episode.traces if not UNIQUE.fullmatch(row["trace_id"].replace("-", "").lower())]
    new = {row["trace_id"]: _new_id(row, episode.messages) for row in short}
    if not new:
        return episode
    return replace(
        episode,
        episode_id=new.get(episode.episode_id, episode.episode_id),
        traces=[_rename(row, new[row["trace_id"]]) if row["trace_id"] in new else row for row in episode.traces],
        messages=[row | {"trace_id": new.get(row["trace_id"], row["trace_id"])} for row in episode.messages],
    )


def _new_id(row: Row, messages: Sequence[Row]) -> str:
    source = source_of(row, [message for message in messages if message["trace_id"] == row["trace_id"]])
    return f"{digest(canonical_json(source))[:ID_LENGTH]}-{row['trace_id']}"


def _rename(row: Row, trace_id: str) -> Row:
    record = json.loads(row["record"])
    record[MARK] = {**record[MARK], "id": row["trace_id"]}
    return {**row, "trace_id": trace_id, "record": compact(record)}
