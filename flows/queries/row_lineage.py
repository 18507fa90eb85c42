"""Row lineage: which row of which table came from which, from an example to a policy and back.

What a row means is said here as data: a kind of row lives in a table, and an edge says by which columns a lower row
names the upper one it came from. Which work may be looked into for it, the ledger's graph knows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from storage.read.frames import Frames
from storage.read.lineage import Graph, Work


@dataclass(frozen=True)
class RowKind:
    """Rows that can be asked about: where they live, what names them, and which columns are shown of them."""

    name: str
    table: str
    row_id: tuple[str, ...]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edge:
    """A lower row names the upper row that it came from: `lower[on[0]] == upper[on[1]]` for every pair."""

    upper: str
    lower: str
    on: tuple[tuple[str, str], ...]
    same_work: bool = False
    """Whether both were made by one piece of work."""


@dataclass(frozen=True)
class RowNode:
    """One row: its kind, its own id, and the key of the work that made it."""

    kind: str
    id: str
    key: str


@dataclass
class RowTree:
    """Rows that were reached from some rows, in one direction; rows reached twice are there once."""

    roots: list[RowNode]
    facts: dict[RowNode, dict[str, Any]] = field(default_factory=dict)
    """The columns of each row that are shown."""
    next: dict[RowNode, list[RowNode]] = field(default_factory=dict)
    """The rows one edge further, in order."""


KINDS = {
    kind.name: kind
    for kind in (
        RowKind("example", "examples", ("environment", "example_id"), ("split",)),
        RowKind("assignment", "assignments", ("assignment_id",), ("group_id", "environment", "example_id", "seed")),
        RowKind(
            "trace",
            "traces",
            ("trace_id",),
            ("assignment_id", "agent", "reward", "error_class", "policy_key", "policy_version", "staleness"),
        ),
        RowKind("verdict", "verdicts", ("trace_id",), ("keep", "reason", "detected")),
        RowKind("sample", "samples", ("sample_id",), ("trace_id", "reward", "baseline", "advantage", "num_tokens")),
        RowKind("row", "batches", ("row",), ("update", "sample_ids", "rl_tokens", "ce_tokens")),
        RowKind("update", "updates", ("update",), ("version", "policy_key_in", "loss", "grad_norm", "num_tokens")),
        RowKind("policy", "policies", ("policy_key",), ("version", "parent_key", "weights_sha256")),
    )
}
EDGES = (
    Edge("policy", "trace", (("policy_key", "policy_key"),)),
    Edge("policy", "update", (("policy_key_in", "policy_key"),)),
    Edge("example", "assignment", (("environment", "environment"), ("example_id", "example_id"))),
    Edge("assignment", "trace", (("assignment_id", "assignment_id"),)),
    Edge("trace", "trace", (("trace_id", "trace_id"),)),
    Edge("trace", "verdict", (("trace_id", "trace_id"),)),
    Edge("verdict", "sample", (("trace_id", "trace_id"),)),
    Edge("sample", "row", (("sample_ids", "sample_id"),)),
    Edge("row", "update", (("update", "update"),)),
    Edge("update", "policy", (), same_work=True),
)
"""From top to bottom. A trace that was scored again came from the one that was sampled. A policy is at both ends: the
way goes on from one that was asked about, and ends at one that it comes to."""


def together(trees: Iterable[RowTree]) -> RowTree:
    """Return several trees as one."""
    whole = RowTree([])
    for tree in trees:
        whole.roots.extend(tree.roots)
        whole.facts.update(tree.facts)
        whole.next.update(tree.next)
    return whole


def find_rows(frames: Frames, kind: str, values: Mapping[str, Any], works: Iterable[Work]) -> RowTree:
    """Return the rows of a kind with these values in some work, as a tree without edges."""
    found = RowTree([])
    for node, facts in _rows(frames, kind, works, [(column, [value]) for column, value in values.items()]):
        found.roots.append(node)
        found.facts[node] = facts
    return found


def traverse(frames: Frames, start: RowTree, up: bool) -> RowTree:
    """Return all rows that the roots came from (`up`), or that came from them; one read for all rows of a kind.

    Each edge is taken once: they are in the order of the way, so all rows of a kind are there when it is left.
    """
    tree = RowTree(list(start.roots), dict(start.facts))
    for edge in reversed(EDGES) if up else EDGES:
        near, far = (edge.lower, edge.upper) if up else (edge.upper, edge.lower)
        nodes = [node for node in tree.facts if node.kind == near]
        while nodes:
            known = set(tree.facts)
            for node, reached, facts in _step(frames, edge, far, nodes, tree, up):
                tree.facts.setdefault(reached, facts)
                tree.next.setdefault(node, []).append(reached)
            nodes = [node for node in tree.facts if node.kind == near and node not in known]
    return tree


def _step(
    frames: Frames, edge: Edge, far: str, nodes: Sequence[RowNode], tree: RowTree, up: bool
) -> Iterable[tuple[RowNode, RowNode, dict[str, Any]]]:
    """Yield every pair of a row and one that it is joined to by the edge."""
    ways = {key: _works(frames.graph, edge, frames.graph.works[key], up) for key in {node.key for node in nodes}}
    works = {work.key: work for found in ways.values() for work in found}
    columns = [(pair[0], pair[1]) if up else (pair[1], pair[0]) for pair in edge.on]
    wanted = [(there, sorted({v for n in nodes for v in _values(tree.facts[n], here)})) for here, there in columns]
    index: dict[tuple[Any, ...], list[tuple[RowNode, dict[str, Any]]]] = {}
    for node, facts in _rows(frames, far, works.values(), wanted) if works else ():
        for values in _combinations(facts, [there for _, there in columns]):
            index.setdefault((node.key, *values), []).append((node, facts))
    for node in nodes:
        for work in ways[node.key]:
            for values in _combinations(tree.facts[node], [here for here, _ in columns]):
                for reached, facts in index.get((work.key, *values), ()):
                    yield node, reached, facts


def _works(graph: Graph, edge: Edge, work: Work, up: bool) -> list[Work]:
    upper, lower = KINDS[edge.upper].table, KINDS[edge.lower].table
    if edge.same_work:
        return [work] if {upper, lower} <= work.tables else []
    return graph.sources(work, upper) if up else graph.users(work, upper, made=lower)


def _rows(
    frames: Frames, kind: str, works: Iterable[Work], wanted: Iterable[tuple[str, Sequence[Any]]]
) -> list[tuple[RowNode, dict[str, Any]]]:
    """Return the rows of a kind in some work whose columns hold any of the values wanted."""
    described = KINDS[kind]
    rows = frames.rows(works, described.table)
    rows = rows.select("key", "seq", *dict.fromkeys((*described.row_id, *described.columns)))
    for column, values in wanted:
        if rows.collect_schema()[column] == pl.List(pl.String):
            rows = rows.filter(pl.col(column).list.eval(pl.element().is_in(values)).list.any())
        else:
            rows = rows.filter(pl.col(column).is_in(values))
    found = rows.sort("key", "seq").drop("seq").collect().to_dicts()
    return [(_node(described, row), row) for row in found]


def _node(kind: RowKind, row: Mapping[str, Any]) -> RowNode:
    return RowNode(kind.name, "/".join(str(row[column]) for column in kind.row_id), row["key"])


def _values(facts: Mapping[str, Any], column: str) -> list[Any]:
    value = facts[column]
    return value if isinstance(value, list) else [value]


def _combinations(facts: Mapping[str, Any], columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """The values by which a row is joined: one tuple, or of a column of lists one for each element."""
    if len(columns) == 1:
        return [(value,) for value in _values(facts, columns[0])]
    return [tuple(facts[column] for column in columns)]
