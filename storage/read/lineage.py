"""Lineage: finished work as a graph of keys, out of the ledger alone: what came from what, over all runs.

A key is computed once and may be used by many runs. Work that several runs share is one node here, so a branch shows as
a key with children of several runs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from operator import attrgetter
from typing import Any

from storage.refs import Entry, Slice, identity


@dataclass(frozen=True)
class Work:
    """The work of one key: its ledger row and the runs that use it. Of unfinished work, the row of its oldest part."""

    entry: Entry
    slices: tuple[Slice, ...]
    """The rows it made, of all tables."""
    runs: tuple[str, ...]
    """The runs that use it, sorted."""
    finished: bool
    """False while only parts of it are committed."""

    @property
    def key(self) -> str:
        """The name of the work."""
        return self.entry.key

    @property
    def stage(self) -> str:
        """The stage that did it."""
        return self.entry.stage

    @property
    def step(self) -> int:
        """The step it belongs to."""
        return self.entry.step

    @property
    def inputs(self) -> Mapping[str, str]:
        """The keys, and digests of what has no key, that went in, by name."""
        return self.entry.inputs

    @property
    def age(self) -> tuple[datetime, str]:
        """What orders work by when it was done: the greater, the later."""
        return self.entry.finished_at, self.key

    @cached_property
    def identity(self) -> tuple[str, ...]:
        """What names the rows that it has now: its key and their attempts.

        The key alone does not: parts add rows to it, and of work that was removed and done again it has others.
        """
        return identity(self.key, self.slices)

    @property
    def computed_by(self) -> str:
        """The run whose process computed the rows."""
        return self.slices[0].run if self.slices else self.entry.run

    @cached_property
    def tables(self) -> frozenset[str]:
        """The tables it made rows of, or found that there are none to make."""
        return frozenset(piece.table for piece in self.slices)

    def slices_of(self, table: str) -> tuple[Slice, ...]:
        """The rows it made of one table, in order."""
        return tuple(piece for piece in self.slices if piece.table == table)

    def num_rows(self, table: str) -> int:
        """How many rows of one table it made."""
        return sum(piece.rows for piece in self.slices_of(table))

    def description(self) -> dict[str, Any]:
        """The work as plain JSON values, with its config section and the versions of what computed it."""
        return {
            "key": self.key,
            "stage": self.stage,
            "stage_version": self.entry.stage_version,
            "step": self.step,
            "runs": list(self.runs),
            "computed_by": self.computed_by,
            "finished": self.finished,
            "inputs": dict(self.inputs),
            "rows": {table: self.num_rows(table) for table in sorted(self.tables)},
            "section": dict(self.entry.section),
            "versions": dict(self.entry.versions),
        }


def row_identities(works: Iterable[Work | Entry | None]) -> tuple[str, ...]:
    """Return what names the rows of some works together, those that are not done left out."""
    return tuple(name for work in works if work is not None for name in work.identity)


class Graph:
    """All work by key, with its inputs as edges; built once, from the ledger's rows at that moment."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        by_key: dict[str, list[Entry]] = {}
        for entry in entries:
            by_key.setdefault(entry.key, []).append(entry)
        self.works = {key: _work(found) for key, found in by_key.items()}
        self._of_runs: dict[str, Graph] = {}

    def of_run(self, run: str) -> "Graph":
        """The part of the graph that a run uses; the same object whenever it is asked for."""
        # Asked for again by every table of a page, and always the same.
        if run not in self._of_runs:
            used = Graph(())
            used.works = {key: work for key, work in self.works.items() if run in work.runs}
            self._of_runs[run] = used
        return self._of_runs[run]

    @cached_property
    def _children(self) -> dict[str, list[Work]]:
        """By key, the work that has it for an input, by step and stage."""
        found: dict[str, list[Work]] = {}
        for work in sorted(self.works.values(), key=_order):
            for key in dict.fromkeys(work.inputs.values()):
                found.setdefault(key, []).append(work)
        return found

    def parents(self, key: str) -> list[Work]:
        """The work that went into a key, in order of name; digests of files and the like are no work."""
        # One work may go in under several names.
        found = dict.fromkeys(key for _, key in sorted(self.works[key].inputs.items()))
        return [self.works[each] for each in found if each in self.works]

    def origins(self, work: Work, table: str) -> Sequence[Work]:
        """The work that made a table's rows of what some work handed on: itself, or where it came from.

        What scored rollouts again has no messages or images of its own.
        """
        return [work] if table in work.tables else self.sources(work, table)

    def children(self, key: str) -> list[Work]:
        """The work that a key went into, by step and stage."""
        return list(self._children.get(key, ()))

    def ancestors(self, key: str) -> list[Work]:
        """All work that a key came from, without itself, nearest first."""
        return _reach(key, self.parents)

    def descendants(self, key: str) -> list[Work]:
        """All work that came from a key, without itself, nearest first."""
        return _reach(key, self.children)

    def sources(self, work: Work, table: str) -> list[Work]:
        """The inputs of a work whose rows of a table it took: none that another of its inputs has made anew.

        A policy is not made anew by one that was trained from it: rollouts of a stream come from several of a line.
        """
        makers = [each for each in self.parents(work.key) if table in each.tables]
        if table == "policies":
            return makers
        return [each for each in makers if not any(each.key in other.inputs.values() for other in makers)]

    def users(self, work: Work, table: str, made: str) -> list[Work]:
        """The work that made rows of `made` and took those of `table` from this one."""
        return [each for each in self.children(work.key) if made in each.tables and work in self.sources(each, table)]

    def makers(self, table: str) -> list[Work]:
        """All work that made rows of a table, by step and stage."""
        return sorted((work for work in self.works.values() if table in work.tables), key=_order)


def _work(entries: list[Entry]) -> Work:
    """One key's rows as one piece of work; parts count only as long as nobody has finished the whole."""
    # Parts stay in the ledger beside the whole: counted with it, their rows would be there twice.
    whole = sorted((entry for entry in entries if not entry.part), key=attrgetter("age"))
    if whole:
        return Work(whole[0], whole[0].outputs, tuple(sorted({entry.run for entry in whole})), True)
    parts: dict[str, Entry] = {}
    for entry in sorted(entries, key=attrgetter("age")):
        parts.setdefault(entry.part, entry)
    runs = tuple(sorted({entry.run for entry in entries}))
    slices = tuple(piece for _, entry in sorted(parts.items()) for piece in entry.outputs)
    return Work(next(iter(parts.values())), slices, runs, False)


def _reach(key: str, step: Callable[[str], list[Work]]) -> list[Work]:
    """The work reached from a key, without itself, breadth first; a cycle, which keys rule out, would end too."""
    found: dict[str, Work] = {}
    edge = [key]
    while edge:
        near = {work.key: work for each in edge for work in step(each) if work.key != key}
        edge = [each for each in near if each not in found]
        found |= {each: near[each] for each in edge}
    return list(found.values())


def _order(work: Work) -> tuple[object, ...]:
    return work.step, work.stage, work.key
