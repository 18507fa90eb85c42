"""Placing: which step, group and member every imported episode is, and its rows with that filled in."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from storage.schemas.stage_tables import ASSIGNMENTS, EXAMPLES, MESSAGES, TRACES
from tasks.exchange.episodes import Episode, Row
from tasks.exchange.problems import Problem


@dataclass(frozen=True)
class Imported:
    """What an import brings in: the rows of every step, ready to be written."""

    example_rows: tuple[Row, ...]
    steps: dict[int, tuple[Episode, ...]]
    """Episodes by step, each with its assignment."""

    def examples(self) -> pa.Table:
        """Return the examples that were tried, in the EXAMPLES schema."""
        return pa.Table.from_pylist(list(self.example_rows), schema=EXAMPLES.arrow)

    def assignments(self, step: int) -> pa.Table:
        """Return the assignments of a step, in the ASSIGNMENTS schema, groups and members in their order."""
        rows = [episode.assignment for episode in self.steps[step] if episode.assignment]
        rows.sort(key=_by_number)
        return pa.Table.from_pylist(rows, schema=ASSIGNMENTS.arrow)

    def traces(self, step: int) -> pa.Table:
        """Return the traces of a step, in the TRACES schema."""
        rows = [row for episode in self.steps[step] for row in episode.traces]
        return pa.Table.from_pylist(rows, schema=TRACES.arrow)

    def messages(self, step: int) -> pa.Table:
        """Return the messages of a step, in the MESSAGES schema."""
        rows = [row for episode in self.steps[step] for row in episode.messages]
        return pa.Table.from_pylist(rows, schema=MESSAGES.arrow)

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


def _by_number(assignment: Row) -> list[tuple[int, str]]:
    """Order ids with numbers in them as one would count: 0-2 comes before 0-10."""
    parts = re.split(r"(\d+)", assignment["assignment_id"])
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def doubled(episodes: Sequence[Episode]) -> tuple[list[Episode], list[Problem]]:
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
        problems.append(Problem(origin.file, origin.line, "a trace is there twice", detail))
    return kept, problems


def place(episodes: Sequence[Episode], groups_per_step: int = 0) -> Imported:
    """Return the episodes by step and group, in the order of the files.

    An episode of our own export keeps its assignment. Others go to the step that the file names, 0 where it names
    none; within a step, episodes of one group of the file, or else of one example, are a group. With
    `groups_per_step` all are dealt anew to steps of that many groups. Lines that are traces of one episode are one.
    """
    joined = _joined(episodes)
    if groups_per_step:
        joined = _dealt(joined, groups_per_step)
    # Groups of two runs, or of a run and of a file that has no assignments, may go by the same number.
    runs = {_run_of(episode) for episode in joined}
    members: Counter[str] = Counter()
    num_groups: Counter[int] = Counter()
    slots: dict[tuple[object, ...], str] = {}
    steps: dict[int, list[Episode]] = {}
    examples: dict[tuple[str, str], tuple[str, Row]] = {}
    for episode in joined:
        known = _with_example(episode, examples)
        step = known.step or 0
        if known.assignment is None:
            key = (step, known.group, known.environment, known.example_id)
            if key not in slots:
                slots[key] = f"{step}-{num_groups[step]}"
                num_groups[step] += 1
            known = replace(known, assignment=_assignment(known, slots[key], members[slots[key]]))
            members[slots[key]] += 1
        elif len(runs) > 1:
            known = replace(known, assignment=_of_run(known))
        steps.setdefault(step, []).append(_settled(known, step))
    ordered = {step: tuple(steps[step]) for step in sorted(steps)}
    return Imported(tuple(row for _, row in examples.values()), ordered)


def _joined(episodes: Sequence[Episode]) -> list[Episode]:
    """Make one episode of lines that are traces of the same one, at the place of the first."""
    found: dict[object, Episode] = {}
    for number, episode in enumerate(episodes):
        by_id = episode.assignment is None and episode.episode_id != episode.traces[0]["trace_id"]
        key = (episode.environment, episode.step, episode.episode_id) if by_id else number
        before = found.get(key)
        if before is None:
            found[key] = episode
        else:
            traces, messages = [*before.traces, *episode.traces], [*before.messages, *episode.messages]
            found[key] = replace(before, traces=traces, messages=messages)
    return list(found.values())


def _dealt(episodes: Sequence[Episode], groups_per_step: int) -> list[Episode]:
    places: dict[object, int] = {}
    for episode in episodes:
        places.setdefault(_group_of(episode), len(places))
    return [
        replace(episode, step=places[_group_of(episode)] // groups_per_step, assignment=None) for episode in episodes
    ]


def _group_of(episode: Episode) -> object:
    return (episode.step, episode.group, episode.environment, episode.example_id)


def _with_example(episode: Episode, examples: dict[tuple[str, str], tuple[str, Row]]) -> Episode:
    """Note the episode's example; one with another task under a known id gets an id of its own.

    Of a conversation the prompt is what counts, and the first one's task is the example's: each trace has its own task
    in its record.
    """
    example_id, number = episode.example_id, 1
    same = episode.same or episode.task
    while True:
        row = {"environment": episode.environment, "example_id": example_id}
        row |= {"split": episode.split, "task": episode.task}
        known, _ = examples.setdefault((episode.environment, example_id), (same, row))
        if known == same:
            return replace(episode, example_id=example_id)
        number += 1
        example_id = f"{episode.example_id}#{number}"


def _assignment(episode: Episode, group: str, member: int) -> Row:
    return {
        "assignment_id": f"{group}/{member}",
        "group_id": group,
        "member": member,
        "environment": episode.environment,
        "example_id": episode.example_id,
        "seed": episode.seed,
    }


def _run_of(episode: Episode) -> str | None:
    """Return the run that an episode's assignment is of; None where it has none."""
    return episode.group.partition(":")[0] if episode.assignment and episode.group else None


def _of_run(episode: Episode) -> Row:
    """Return an assignment whose ids name its run: those of two runs are the same."""
    assert episode.assignment is not None
    group, run = episode.assignment["group_id"], _run_of(episode)
    return episode.assignment | {
        "group_id": f"{run}:{group}",
        "assignment_id": f"{run}:{episode.assignment['assignment_id']}",
    }


def _settled(episode: Episode, step: int) -> Episode:
    """Fill in what the assignment decides; what a trace's own columns say of its policy stays."""
    assert episode.assignment is not None
    names = ("assignment_id", "group_id", "environment", "example_id")
    decided = {name: episode.assignment[name] for name in names} | {"episode_id": episode.episode_id}
    unknown = {"policy_version": step, "staleness": 0}
    return replace(episode, traces=[{**unknown, **row, **decided} for row in episode.traces])
