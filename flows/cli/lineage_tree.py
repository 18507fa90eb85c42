"""The lineage of a row: the rows that it came from, those that were made from it, and the work behind them."""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flows.queries.row_lineage import WORK, RowNode, RowTree, identify, policy_names, policy_version, traverse
from flows.queries.sentences import KEY, flat, row_line, title_of, work_line
from storage.read.frames import Frames
from storage.read.lineage import Graph, Work

MOST_SIBLINGS = 6
"""Rows of one kind below one row that are printed; JSON has all."""
WIDTH = 120


@dataclass(frozen=True)
class Lineage:
    """What was asked about, and what was found in each direction that was asked for."""

    id: str
    roots: list[RowNode]
    trees: dict[str, RowTree]
    """By direction, `up` or `down`."""
    graph: Graph

    @property
    def works(self) -> list[Work]:
        """The work that made any of the rows, by step; each with its config section and versions."""
        keys = dict.fromkeys(node.key for tree in self.trees.values() for node in tree.facts)
        return sorted((self.graph.works[key] for key in keys), key=lambda work: (work.step, work.entry.finished_at))

    def policies(self, direction: str) -> list[Work]:
        """All policies that the rows came from, or all that came from them, by version."""
        reach = self.graph.ancestors if direction == "up" else self.graph.descendants
        found = {work.key: work for root in self.roots for work in reach(root.key) if "policies" in work.tables}
        return sorted(found.values(), key=lambda work: (policy_version(work), work.key))


def trace_lineage(frames: Frames, text: str, directions: list[str], kind: str = "") -> Lineage:
    """Return the lineage of an id within the rows of `frames`."""
    start = identify(frames, text, kind)
    # Work has no rows of its own to go by: its neighbours in the ledger are its lineage.
    if start.roots[0].kind == WORK:
        trees = {direction: _of_work(frames.graph, start, direction) for direction in directions}
    else:
        trees = {direction: traverse(frames, start, up=direction == "up") for direction in directions}
    return Lineage(text, start.roots, trees, frames.graph)


def _of_work(graph: Graph, start: RowTree, direction: str) -> RowTree:
    """Return the work around a key; policies are the border, or every step would bring in all before it."""
    tree = RowTree(list(start.roots), {root: {} for root in start.roots})
    edge = list(start.roots)
    while edge:
        node = edge.pop()
        for work in graph.parents(node.key) if direction == "up" else graph.children(node.key):
            near = RowNode(WORK, work.stage, work.key)
            tree.next.setdefault(node, []).append(near)
            if near not in tree.facts and "policies" not in work.tables:
                edge.append(near)
            tree.facts.setdefault(near, {})
    return tree


def as_values(found: Lineage) -> dict[str, Any]:
    """Return a lineage as plain JSON values: rows, edges from lower to further rows, policies and all the work."""
    values: dict[str, Any] = {"id": found.id, "kind": found.roots[0].kind, "roots": [_name(n) for n in found.roots]}
    for direction, tree in found.trees.items():
        values[direction] = {
            "rows": [_row(node, facts, found.graph) for node, facts in tree.facts.items()],
            "edges": [[_name(node), _name(far)] for node, reached in tree.next.items() for far in reached],
            "policies": [
                {"key": work.key, "version": policy_version(work), "names": policy_names(work)}
                for work in found.policies(direction)
            ],
        }
    return values | {"works": [work.description() for work in found.works]}


def _name(node: RowNode) -> str:
    return f"{node.kind}:{node.id}@{node.key}"


def _row(node: RowNode, facts: dict[str, Any], graph: Graph) -> dict[str, Any]:
    work = graph.works[node.key]
    given = {"name": _name(node), "kind": node.kind, "id": node.id, "key": node.key, "stage": work.stage}
    return {**given, "step": work.step, "runs": list(work.runs), "computed_by": work.computed_by, "facts": facts}


def lines(found: Lineage) -> Iterator[str]:
    """Yield a lineage as lines for people: a tree in each direction, the policies, the work with its settings."""
    titles = {"up": "came from", "down": "became"}
    for direction, tree in found.trees.items():
        yield f"{title_of(found.roots[0], found.graph)} {titles[direction]}:"
        for root in found.roots:
            yield from _branches(
                tree if direction == "down" else _without_named_policies(tree), root, found.graph, "", "", set()
            )
        yield from _policies(found, direction)
        yield ""
    yield from _works(found.works)


def _without_named_policies(tree: RowTree) -> RowTree:
    """Leave out the policies that lines of rollouts and updates name anyway."""
    named = ("trace", "update")
    below = {node: [far for far in reached if far.kind != "policy"] for node, reached in tree.next.items()}
    return replace(tree, next={node: below[node] if node.kind in named else tree.next[node] for node in tree.next})


def _branches(tree: RowTree, node: RowNode, graph: Graph, first: str, rest: str, seen: set[RowNode]) -> Iterator[str]:
    # A row that is reached by two ways is printed in full once: the tree would grow with every way.
    again = node in seen and bool(tree.next.get(node))
    yield first + row_line(node, tree.facts[node], graph) + (" (as above)" if again else "")
    if again:
        return
    seen.add(node)
    below = list(dict.fromkeys(tree.next.get(node, [])))
    shown = below[:MOST_SIBLINGS]
    for place, lower in enumerate(shown):
        mark, bar = ("└", " ") if place == len(below) - 1 else ("├", "│")
        yield from _branches(tree, lower, graph, f"{rest}{mark}─ ", f"{rest}{bar}  ", seen)
    if len(below) > len(shown):
        yield f"{rest}└─ ... and {len(below) - len(shown)} more (--json has all)"


def _policies(found: Lineage, direction: str) -> Iterator[str]:
    by_run: dict[str, list[int]] = {}
    for work in found.policies(direction):
        for run in work.runs:
            by_run.setdefault(run, []).append(policy_version(work))
    sense = "Policies before it" if direction == "up" else "Policies that go back to it"
    for run, versions in sorted(by_run.items()):
        numbers = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else f"{versions[0]}"
        yield f"{sense}, of {run}: {numbers} ({len(versions)})"


def _works(works: list[Work]) -> Iterator[str]:
    yield "Made by"
    for work in works:
        yield f"  {work_line(work)}; version {work.entry.stage_version} of the stage"
    # Each section and each set of versions once, behind all the work that it is of: most of it shares them.
    sections: dict[str, list[str]] = {}
    versions: dict[str, list[str]] = {}
    for work in works:
        title = f"{work.stage} {work.key[:KEY]}"
        for name, section in work.entry.section.items():
            leaves = ", ".join(f"{path}={json.dumps(value)}" for path, value in flat(section, name))
            sections.setdefault(leaves, []).append(title)
        used = ", ".join(f"{name} {version}" for name, version in work.entry.versions.items() if version)
        versions.setdefault(used or "versions unknown", []).append(title)
    if sections:
        yield "With these settings in their keys"
    yield from _titled_work(sections)
    yield "With these versions"
    yield from _titled_work(versions)


def _titled_work(works: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield what work was done with, each behind the titles of that work."""
    for text, titles in works.items():
        line = f"{', '.join(titles)}: {text}"
        yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
