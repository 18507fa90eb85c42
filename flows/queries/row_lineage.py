"""Rows by their ids, and row lineage: which row of which table came from which, from an example to a policy and back.

What a row means is said here as data: a kind of row lives in a table, and an edge says by which columns a lower row
names the upper one it came from. Which work may be looked into for it, the ledger's graph knows.

An id that somebody typed may name several things, for ids need not be unique over runs. Written as    names
  RUN or RUN:VERSION           a policy, the last one or that of a version
  RUN:STEP:ROW or KEY/ROW      a row of the batch that the run trained at a step, or of a packing
  TRACE, TRACE/BRANCH          a rollout, a training sample of it
  ENVIRONMENT/EXAMPLE          an example
  GROUP/MEMBER                 an assignment
  KEY                          a policy or any other finished work, by its key in the ledger
Keys and traces may be cut to their first eight characters or more.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product, takewhile
from operator import eq
from typing import Any

import polars as pl

from flows.queries.step_history import StepHistory
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


def _names(cell: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in cell.split(",") if name.strip())


KINDS = {name: RowKind(name, table, _names(ids), _names(columns)) for name, table, ids, columns in _cells(_KINDS)}
EDGES = tuple(
    Edge(upper, lower, tuple((pair.split()[0], pair.split()[2]) for pair in _names(pairs)), same_work=bool(same_work))
    for upper, lower, pairs, *same_work in _cells(_EDGES)
)
"""From top to bottom. A trace that several policies sampled came from each of them through its tokens, and itself names
the oldest. A trace that was scored again came from the one that was sampled. A policy is at both ends: the
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
        # An edge may lead to rows of the same kind, a trace that was scored again: until nothing new comes.
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
    here, there = zip(*edge.on, strict=True) if edge.on else ((), ())
    if not up:
        here, there = there, here
    values = [sorted({v for n in nodes for v in _values(tree.facts[n], column)}) for column in here]
    # One read for all rows of a kind, joined in memory: a read for each row would open the files again and again.
    index: dict[tuple[Any, ...], list[tuple[RowNode, dict[str, Any]]]] = {}
    for node, facts in _rows(frames, far, works.values(), zip(there, values, strict=True)) if works else ():
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


SHORTEST_PREFIX = 8
NEAREST = 5
WORK = "work"
NAMED = (*(kind for kind in KINDS if kind not in ("tokens", "verdict", "update")), WORK)
"""What an id may be said to be."""


SLASHED = ("assignment_id", "sample_id")
"""Columns of ids that are made with a slash, GROUP/MEMBER and TRACE/BRANCH: any other text is in no row of theirs."""
NUMBER = re.compile("[0-9]{1,9}")
"""The number of a step or of a row; of a longer one there is none, and a table could not be asked for it."""


class UnknownId(ValueError):
    """An id names nothing in the store, or several different things."""


def identify(frames: Frames, text: str, kind: str = "") -> RowTree:
    """Return the rows that an id names: of one kind and one id, once for each work that made it.

    `kind` chooses where an id can be read in several ways. Raises UnknownId, with the nearest ids.
    """
    if kind and kind not in NAMED:
        raise UnknownId(f"{kind!r} is no kind of thing that an id can name; there are {', '.join(NAMED)}")
    # Every reading is tried, not the first that fits: an id that names two things is refused rather than guessed.
    found = {name: tree for name in ([kind] if kind else NAMED) if (tree := _find(frames, name, text)).roots}
    if not found:
        near = nearest(text, _pool(frames))
        where = f"run {frames.only!r} of store" if frames.only else "store"
        raise UnknownId(
            f"{where} {frames.store.root.address}: {text!r} names {f'no {kind}' if kind else 'nothing'}"
            f"{'; the nearest ids are ' + ', '.join(near) if near else ''}. The store was only read"
        )
    if len(found) > 1:
        raise UnknownId(f"{text!r} names {' and '.join(f'a {name}' for name in found)}: say which one with --kind")
    ((kind, tree),) = found.items()
    several = sorted({node.key if kind == WORK else node.id for node in tree.roots})
    if len(several) > 1:
        raise UnknownId(f"{text!r} is the beginning of several ids, {', '.join(several[:NEAREST])}: give more of it")
    return tree


def nearest(text: str, pool: Iterable[str]) -> list[str]:
    """Return the ids that are most like `text`: those that begin like it, and names that differ by a letter or two."""
    names = list(dict.fromkeys(pool))
    begins = [(sum(1 for _ in takewhile(bool, map(eq, text, name))), name) for name in names]
    alike = [name for length, name in sorted(begins, key=lambda pair: (-pair[0], pair[1])) if length >= 3]
    # difflib goes letter by letter and is slow: only those that begin alike, else the first ones, are compared.
    close = difflib.get_close_matches(text, alike[:200] or names[:2000], NEAREST, 0.6)
    return list(dict.fromkeys((*close, *alike)))[:NEAREST]


def _find(frames: Frames, kind: str, text: str) -> RowTree:
    if kind == WORK:
        works = [work for work in _by_key(frames, text) if "policies" not in work.tables]
        return RowTree([RowNode(WORK, work.stage, work.key) for work in works])
    if kind == "policy":
        return find_rows(frames, kind, {}, [work for work in _policies(frames, text) if work.finished])
    if kind == "row":
        return _batch_rows(frames, text)
    return _by_id(frames, kind, text)


def _policies(frames: Frames, text: str) -> list[Work]:
    named = [work for work in frames.graph.makers("policies") if text in policy_names(work)]
    # The graph lists makers by step: the last one made the policy of the last step.
    last = frames.graph.of_run(text).makers("policies")[-1:] if text in frames.run_names else []
    by_key = [work for work in _by_key(frames, text) if "policies" in work.tables]
    return list({work.key: work for work in (*named, *last, *by_key)}.values())


def policy_version(work: Work) -> int:
    """Return the version of the policy that a work made: training at step k makes k + 1, an import 0."""
    return work.step + 1 if "policy" in work.inputs else 0


def policy_names(work: Work) -> list[str]:
    """Return the names RUN:VERSION of the policy that a work made, one for each run that uses it."""
    return [f"{run}:{policy_version(work)}" for run in work.runs]


def _batch_rows(frames: Frames, text: str) -> RowTree:
    head, _, row = text.rpartition(":" if ":" in text else "/")
    if not NUMBER.fullmatch(row):
        return RowTree([])
    run, _, step = head.rpartition(":")
    works = _batches(frames, run, int(step)) if run and NUMBER.fullmatch(step) else _by_key(frames, head)
    return find_rows(frames, "row", {"row": int(row)}, [work for work in works if "batches" in work.tables])


def _batches(frames: Frames, run: str, step: int) -> list[Work]:
    """Return the packing that a run trained last at a step, or the last one where it has trained none."""
    found = StepHistory(frames.graph, run).batch(step)
    return [found[0]] if found else []


def _by_key(frames: Frames, prefix: str) -> list[Work]:
    if not re.fullmatch(f"[0-9a-f]{{{SHORTEST_PREFIX},}}", prefix):
        return []
    return [work for key, work in frames.graph.works.items() if key.startswith(prefix)]


def _by_id(frames: Frames, kind: str, text: str) -> RowTree:
    described = KINDS[kind]
    several_columns = len(described.row_id) > 1
    if "/" not in text and (several_columns or described.row_id[0] in SLASHED):
        return RowTree([])
    # A column as it is stored: files whose statistics rule the id out are not read.
    name = pl.concat_str(described.row_id, separator="/") if several_columns else pl.col(*described.row_id)
    rows = frames.rows(frames.graph.makers(described.table), described.table).select(*described.row_id, "key")
    found = rows.filter(name == text).collect()
    # A whole id goes first: it may itself be the beginning of another one.
    if not len(found) and kind == "trace" and len(text) >= SHORTEST_PREFIX:
        found = rows.filter(name.str.starts_with(text)).collect()
    made: dict[tuple[str, ...], list[Work]] = {}
    for *row_id, key in found.unique().sort(*described.row_id).iter_rows():
        made.setdefault(tuple(row_id), []).append(frames.graph.works[key])
    several = list(made.items())[: NEAREST + 1]  # more than one is an error that names some
    return together(
        find_rows(frames, kind, dict(zip(described.row_id, row_id, strict=True)), works) for row_id, works in several
    )


def _pool(frames: Frames) -> Iterable[str]:
    yield from frames.run_names
    for work in frames.graph.makers("policies"):
        yield from policy_names(work)
    for kind in ("trace", "assignment", "example"):
        described = KINDS[kind]
        yield from (
            frames[described.table]
            .select(pl.concat_str(described.row_id, separator="/"))
            .unique()
            .collect()[described.row_id[0]]
        )
    yield from frames.graph.works
