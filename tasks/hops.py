"""Hops: which row of which table came from which, from an example to a policy and back.

What a row means is said here as data: a kind of row lives in a table, and a hop says by which columns a lower row names
the upper one it came from. Which work may be looked into for it, the ledger's graph knows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from storage.read.frames import Frames
from storage.read.lineage import Graph, Work


@dataclass(frozen=True)
class Kind:
    """Rows that can be asked about: where they live, what names them, and what is told of them."""

    name: str
    table: str
    row_id: tuple[str, ...]
    told: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hop:
    """A lower row names the upper row that it came from: `lower[on[0]] == upper[on[1]]` for every pair."""

    upper: str
    lower: str
    on: tuple[tuple[str, str], ...]
    same_work: bool = False
    """Whether both were made by one piece of work."""


@dataclass(frozen=True)
class Node:
    """One row: its kind, its own id, and the key of the work that made it."""

    kind: str
    id: str
    key: str


@dataclass
class Tree:
    """Rows that were reached from some rows, in one direction; rows reached twice are there once."""

    roots: list[Node]
    facts: dict[Node, dict[str, Any]] = field(default_factory=dict)
    """What is told of each row."""
    next: dict[Node, list[Node]] = field(default_factory=dict)
    """The rows one hop further, in order."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("example", "examples", ("environment", "example_id"), ("split",)),
        Kind("assignment", "assignments", ("assignment_id",), ("group_id", "environment", "example_id", "seed")),
        Kind(
            "trace",
            "traces",
            ("trace_id",),
            ("assignment_id", "agent", "reward", "error_class", "policy_key", "policy_version", "staleness"),
        ),
        Kind("verdict", "verdicts", ("trace_id",), ("keep", "reason", "detected")),
        Kind("sample", "credits", ("sample_id",), ("trace_id", "reward", "baseline", "advantage", "num_tokens")),
        Kind("row", "batches", ("row",), ("update", "sample_ids", "rl_tokens", "ce_tokens")),
        Kind("update", "updates", ("update",), ("version", "policy_key_in", "loss", "grad_norm", "num_tokens")),
        Kind("policy", "policies", ("policy_key",), ("version", "parent_key", "weights_sha256")),
    )
}
HOPS = (
    Hop("policy", "trace", (("policy_key", "policy_key"),)),
    Hop("policy", "update", (("policy_key_in", "policy_key"),)),
    Hop("example", "assignment", (("environment", "environment"), ("example_id", "example_id"))),
    Hop("assignment", "trace", (("assignment_id", "assignment_id"),)),
    Hop("trace", "trace", (("trace_id", "trace_id"),)),
    Hop("trace", "verdict", (("trace_id", "trace_id"),)),
    Hop("verdict", "sample", (("trace_id", "trace_id"),)),
    Hop("sample", "row", (("sample_ids", "sample_id"),)),
    Hop("row", "update", (("update", "update"),)),
    Hop("update", "policy", (), same_work=True),
)
"""From top to bottom. A trace that was scored again came from the one that was sampled. A policy is at both ends: the
way goes on from one that was asked about, and ends at one that it comes to."""


def together(trees: Iterable[Tree]) -> Tree:
    """Return several trees as one."""
    whole = Tree([])
    for tree in trees:
        whole.roots.extend(tree.roots)
        whole.facts.update(tree.facts)
        whole.next.update(tree.next)
    return whole


class Walk:
    """Walks from rows to rows through the tables of a store, one read for all rows of a kind."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames
        self._graph: Graph = frames.graph

    def find(self, kind: str, row: Mapping[str, Any], works: Iterable[Work]) -> Tree:
        """Return the rows of a kind with these values in some work, as a tree without hops."""
        found = Tree([])
        rows = self._rows(kind, works, [(column, [value]) for column, value in row.items()])
        for node, facts in rows:
            found.roots.append(node)
            found.facts[node] = facts
        return found

    def up(self, start: Tree) -> Tree:
        """Return all rows that the roots came from."""
        return self._walk(start, reversed(HOPS), up=True)

    def down(self, start: Tree) -> Tree:
        """Return all rows that came from the roots."""
        return self._walk(start, HOPS, up=False)

    def _walk(self, start: Tree, hops: Iterable[Hop], up: bool) -> Tree:
        """Take each hop once: they are in the order of the way, so all rows of a kind are there when it is left."""
        tree = Tree(list(start.roots), dict(start.facts))
        for hop in hops:
            near, far = (hop.lower, hop.upper) if up else (hop.upper, hop.lower)
            nodes = [node for node in tree.facts if node.kind == near]
            while nodes:
                known = set(tree.facts)
                for node, reached, facts in self._step(hop, far, nodes, tree, up):
                    tree.facts.setdefault(reached, facts)
                    tree.next.setdefault(node, []).append(reached)
                nodes = [node for node in tree.facts if node.kind == near and node not in known]
        return tree

    def _step(
        self, hop: Hop, far: str, nodes: Sequence[Node], tree: Tree, up: bool
    ) -> Iterable[tuple[Node, Node, dict[str, Any]]]:
        """Yield every pair of a row and one that it is joined to by the hop."""
        ways = {key: self._works(hop, self._graph.works[key], up) for key in {node.key for node in nodes}}
        works = {work.key: work for found in ways.values() for work in found}
        columns = [(pair[0], pair[1]) if up else (pair[1], pair[0]) for pair in hop.on]
        wanted = [(there, sorted({v for n in nodes for v in _values(tree.facts[n], here)})) for here, there in columns]
        index: dict[tuple[Any, ...], list[tuple[Node, dict[str, Any]]]] = {}
        for node, facts in self._rows(far, works.values(), wanted) if works else ():
            for values in _combinations(facts, [there for _, there in columns]):
                index.setdefault((node.key, *values), []).append((node, facts))
        for node in nodes:
            for work in ways[node.key]:
                for values in _combinations(tree.facts[node], [here for here, _ in columns]):
                    for reached, facts in index.get((work.key, *values), ()):
                        yield node, reached, facts

    def _works(self, hop: Hop, work: Work, up: bool) -> list[Work]:
        upper, lower = KINDS[hop.upper].table, KINDS[hop.lower].table
        if hop.same_work:
            return [work] if {upper, lower} <= work.tables else []
        return self._graph.sources(work, upper) if up else self._graph.users(work, upper, made=lower)

    def _rows(
        self, kind: str, works: Iterable[Work], wanted: Iterable[tuple[str, Sequence[Any]]]
    ) -> list[tuple[Node, dict[str, Any]]]:
        """Return the rows of a kind in some work whose columns hold any of the values wanted."""
        described = KINDS[kind]
        rows = self._frames.of(works, described.table)
        rows = rows.select("key", "seq", *dict.fromkeys((*described.row_id, *described.told)))
        for column, values in wanted:
            if rows.collect_schema()[column] == pl.List(pl.String):
                rows = rows.filter(pl.col(column).list.eval(pl.element().is_in(values)).list.any())
            else:
                rows = rows.filter(pl.col(column).is_in(values))
        found = rows.sort("key", "seq").drop("seq").collect().to_dicts()
        return [(_node(described, row), row) for row in found]


def _node(kind: Kind, row: Mapping[str, Any]) -> Node:
    return Node(kind.name, "/".join(str(row[column]) for column in kind.row_id), row["key"])


def _values(facts: Mapping[str, Any], column: str) -> list[Any]:
    value = facts[column]
    return value if isinstance(value, list) else [value]


def _combinations(facts: Mapping[str, Any], columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """The values by which a row is joined: one tuple, or of a column of lists one for each element."""
    if len(columns) == 1:
        return [(value,) for value in _values(facts, columns[0])]
    return [tuple(facts[column] for column in columns)]
