"""Rows by their ids, and row lineage: which row of which table came from which, from an example to a policy and back.

What a row means is said here as data: a kind of row lives in a table, and an edge says by which columns a lower row
names the upper one it came from. Which work may be looked into for it, the ledger's graph knows.

An id that somebody typed may name several things, for ids need not be unique over runs. Written as    names
  RUN or RUN:VERSION           a policy, the last one or that of a version
  RUN:STEP:ROW or KEY/ROW      a row of the batch that the run trained at a step, or of a packing
  TRACE, TRACE/BRANCH          a rollout, a training sample of it
  ENVIRONMENT/EXAMPLE          an example
  GROUP/MEMBER                 an assignment
  KEY                          a policy, by its key in the ledger
Keys and traces may be cut to their first eight characters or more.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import polars as pl

from flows.queries.request import NotThere
from flows.queries.step_history import StepHistory
from storage.read.frames import Frames
from storage.read.lineage import Graph, Work


class RowKind(NamedTuple):
    """Rows that can be asked about: where they live, what names them, and which columns are shown of them."""

    table: str
    row_id: list[str]
    columns: list[str]


class Edge(NamedTuple):
    """A lower row names the upper row that it came from: `lower[on[0]] == upper[on[1]]` for every pair."""

    upper: str
    lower: str
    on: list[list[str]]
    same_work: bool
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


_KINDS = """
example | examples | environment, example_id | split
assignment | assignments | assignment_id | group_id, environment, example_id, seed
trace | traces | trace_id | assignment_id, agent, reward, error_class, policy_key, policy_version, staleness
tokens | token_policies | trace_id, message, start | num_tokens, policy_key, policy_version
verdict | verdicts | trace_id | keep, reason, detected
sample | samples | sample_id | trace_id, reward, baseline, advantage, num_tokens
row | batches | row | update, sample_ids, rl_tokens, ce_tokens
update | updates | update | version, policy_key_in, loss, grad_norm, num_tokens
policy | policies | policy_key | version, parent_key, weights_sha256
"""
"""Kinds of rows: name, table, columns of the id, columns that are shown."""
_EDGES = """
policy     | tokens     | policy_key = policy_key
policy     | trace      | policy_key = policy_key
policy     | update     | policy_key_in = policy_key
example    | assignment | environment = environment, example_id = example_id
assignment | trace      | assignment_id = assignment_id
tokens     | trace      | trace_id = trace_id            | same work
trace      | trace      | trace_id = trace_id
trace      | verdict    | trace_id = trace_id
verdict    | sample     | trace_id = trace_id
sample     | row        | sample_ids = sample_id
row        | update     | update = update
update     | policy     |                                | same work
"""
"""Edges: the upper kind, the lower kind, columns of the lower row that equal columns of the upper one."""


def _cells(table: str) -> Iterator[list[str]]:
    for line in table.strip().splitlines():
        yield [cell.strip() for cell in line.split("|")]


KINDS = {
    name: RowKind(table, row_id.split(", "), columns.split(", ")) for name, table, row_id, columns in _cells(_KINDS)
}
EDGES = [
    Edge(upper, lower, [pair.split(" = ") for pair in on.split(", ") if pair], bool(same_work))
    for upper, lower, on, *same_work in _cells(_EDGES)
]
"""From top to bottom. A trace that several policies sampled came from each of them through its tokens, and itself names
the oldest. A trace that was scored again came from the one that was sampled. A policy is at both ends: the
way goes on from one that was asked about, and ends at one that it comes to."""


def traverse(frames: Frames, start: RowTree, up: bool) -> RowTree:
    """Return all rows that the roots came from (`up`), or that came from them; one read for all rows of a kind.

    Each edge is taken once: they are in the order of the way, so all rows of a kind are there when it is left.
    """
    tree = RowTree(list(start.roots), dict(start.facts))
    for edge in reversed(EDGES) if up else EDGES:
        near, far = (edge.lower, edge.upper) if up else (edge.upper, edge.lower)
        nodes = [node for node in tree.facts if node.kind == near]
        # An edge may lead to rows of the same kind, a trace that was scored again: until nothing new comes.
        while nodes:
            seen = set(tree.facts)
            for node, reached, facts in _step(frames, edge, far, nodes, tree, up):
                tree.facts.setdefault(reached, facts)
                tree.next.setdefault(node, []).append(reached)
            nodes = [node for node in tree.facts if node.kind == near and node not in seen]
    return tree


def _step(
    frames: Frames, edge: Edge, far: str, nodes: Sequence[RowNode], tree: RowTree, up: bool
) -> Iterable[tuple[RowNode, RowNode, dict[str, Any]]]:
    """Yield every pair of a row and one that it is joined to by the edge."""
    ways = {key: _works(frames.graph, edge, frames.graph.works[key], up) for key in {node.key for node in nodes}}
    works = {work.key: work for reached in ways.values() for work in reached}
    here, there = ([pair[side] for pair in edge.on] for side in ((0, 1) if up else (1, 0)))
    where = [
        _holds(column, sorted({value for node in nodes for value in _values(tree.facts[node], own)}))
        for own, column in zip(here, there, strict=True)
    ]
    # One read for all rows of a kind, joined in memory: a read for each row would open the files again and again.
    index: dict[tuple[Any, ...], list[tuple[RowNode, dict[str, Any]]]] = {}
    for node, facts in _rows(frames, far, works.values(), *where):
        for joined in product(*(_values(facts, column) for column in there)):
            index.setdefault((node.key, *joined), []).append((node, facts))
    for node in nodes:
        for work, joined in product(ways[node.key], product(*(_values(tree.facts[node], column) for column in here))):
            for reached, facts in index.get((work.key, *joined), ()):
                yield node, reached, facts


def _works(graph: Graph, edge: Edge, work: Work, up: bool) -> list[Work]:
    upper, lower = KINDS[edge.upper].table, KINDS[edge.lower].table
    if edge.same_work:
        return [work] if {upper, lower} <= work.tables else []
    return graph.sources(work, upper) if up else graph.users(work, upper, made=lower)


def _holds(column: str, values: Sequence[Any]) -> pl.Expr:
    """Return whether a column, or an element of it, is among some values."""
    is_list = column == "sample_ids"
    return pl.col(column).list.eval(pl.element().is_in(values)).list.any() if is_list else pl.col(column).is_in(values)


def _rows(frames: Frames, kind: str, works: Iterable[Work], *where: pl.Expr) -> list[tuple[RowNode, dict[str, Any]]]:
    """Return the rows of a kind that some work made and that meet conditions."""
    table, row_id, columns = KINDS[kind]
    rows = frames.rows(works, table).select("key", "seq", *dict.fromkeys((*row_id, *columns))).filter(*where)
    listed = rows.sort("key", "seq").drop("seq").collect().to_dicts()
    return [(RowNode(kind, "/".join(str(row[name]) for name in row_id), row["key"]), row) for row in listed]


def _values(facts: Mapping[str, Any], column: str) -> list[Any]:
    value = facts[column]
    return value if isinstance(value, list) else [value]


def find_rows(frames: Frames, kind: str, works: Iterable[Work], *where: pl.Expr) -> RowTree:
    """Return the rows of a kind that some work made and that meet conditions, as a tree without edges."""
    rows = dict(_rows(frames, kind, works, *where))
    return RowTree([*rows], rows)


SHORTEST_PREFIX = 8
NEAREST = 5
NAMED = tuple(kind for kind in KINDS if kind not in ("tokens", "verdict", "update"))
"""What an id may be said to be."""
_IN_BATCH = re.compile(r"(.+):([0-9]{1,9}):([0-9]{1,9})|([0-9a-f]+)/([0-9]{1,9})", re.DOTALL)


class UnknownId(NotThere):
    """An id names nothing in the store, or several different things."""


def identify(frames: Frames, text: str, kind: str = "") -> RowTree:
    """Return the rows that an id names: of one kind and one id, once for each work that made it.

    `kind` chooses where an id can be read in several ways. Raises UnknownId.
    """
    if kind and kind not in NAMED:
        raise UnknownId(f"{kind!r} is no kind of thing that an id can name; there are {', '.join(NAMED)}")
    # Every reading is tried, not the first that fits: an id that names two things is refused rather than guessed.
    trees = {name: tree for name in ([kind] if kind else NAMED) if (tree := _find(frames, name, text)).roots}
    if not trees:
        where = f"run {frames.only!r} of store" if frames.only else "store"
        raise UnknownId(
            f"{where} {frames.store.root.address}: {text!r} names {f'no {kind}' if kind else 'nothing'}. "
            "The store was only read"
        )
    if len(trees) > 1:
        raise UnknownId(f"{text!r} names {' and '.join(f'a {name}' for name in trees)}: say which one with --kind")
    (tree,) = trees.values()
    ids = sorted({node.id for node in tree.roots})
    if len(ids) > 1:
        raise UnknownId(f"{text!r} is the beginning of several ids, {', '.join(ids[:NEAREST])}: give more of it")
    return tree


def _find(frames: Frames, kind: str, text: str) -> RowTree:
    graph = frames.graph
    if kind == "policy":
        named = [work for work in graph.makers("policies") if text in policy_names(work)]
        # The graph lists makers by step: the last one made the policy of the last step.
        last = graph.of_run(text).makers("policies")[-1:] if text in frames.run_names else []
        by_key = [work for work in _by_key(graph, text) if "policies" in work.tables]
        return find_rows(frames, kind, {work.key: work for work in (*named, *last, *by_key) if work.finished}.values())
    if kind == "row":
        match = _IN_BATCH.fullmatch(text)
        if match is None:
            return RowTree([])
        # The packing that the run trained last at the step, or the last one where it has trained none.
        of_step = StepHistory(graph, match[1]).batch(int(match[2])) if match[1] else None
        works = [*(of_step or ())][:1] if match[1] else _by_key(graph, match[4])
        works = [work for work in works if "batches" in work.tables]
        return find_rows(frames, kind, works, pl.col("row").is_in([int(match[3] or match[5])]))
    return _by_id(frames, kind, text)


def policy_version(work: Work) -> int:
    """Return the version of the policy that a work made: training at step k makes k + 1, an import 0."""
    return work.step + 1 if "policy" in work.inputs else 0


def policy_names(work: Work) -> list[str]:
    """Return the names RUN:VERSION of the policy that a work made, one for each run that uses it."""
    return [f"{run}:{policy_version(work)}" for run in work.runs]


def policy_name(graph: Graph, key: str, run: str = "") -> str | None:
    """Return the name of a policy by its key, that of `run` where it uses it; None for one that the store lacks."""
    names = policy_names(graph.works[key]) if key in graph.works else []
    return min(names, key=lambda name: name.rpartition(":")[0] != run, default=None)


def _by_key(graph: Graph, prefix: str) -> list[Work]:
    if not re.fullmatch(f"[0-9a-f]{{{SHORTEST_PREFIX},}}", prefix):
        return []
    return [work for key, work in graph.works.items() if key.startswith(prefix)]


def _by_id(frames: Frames, kind: str, text: str) -> RowTree:
    table, row_id, _ = KINDS[kind]
    if kind != "trace" and "/" not in text:  # GROUP/MEMBER, TRACE/BRANCH, ENVIRONMENT/EXAMPLE
        return RowTree([])
    # A column as it is stored: files whose statistics rule the id out are not read.
    name = pl.concat_str(row_id, separator="/") if len(row_id) > 1 else pl.col(*row_id)
    works = frames.graph.makers(table)
    tree = find_rows(frames, kind, works, name == text)
    # A whole id goes first: it may itself be the beginning of another one.
    if not tree.roots and kind == "trace" and len(text) >= SHORTEST_PREFIX:
        return find_rows(frames, kind, works, name.str.starts_with(text))
    return tree
