"""The lineage of a row: the rows that it came from, those that were made from it, and the policies before and after."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flows.cli.output import cell
from flows.queries.row_lineage import KINDS, RowNode, RowTree, identify, policy_names, policy_version, traverse
from flows.reporting.formats import one_line
from storage.read.frames import Frames
from storage.read.lineage import Graph, Work

MOST_SIBLINGS = 6
"""Rows of one kind below one row that are printed; JSON has all."""
KEY, MAX_VALUE_CHARS = 8, 60
"""Characters of a key, as many as name it in a command, and of a value that are printed."""


@dataclass(frozen=True)
class Lineage:
    """The rows of an id, and those that were reached in each direction."""

    id: str
    roots: list[RowNode]
    trees: dict[str, RowTree]
    """By direction, `up` or `down`."""
    graph: Graph

    def policies(self, direction: str) -> list[Work]:
        """All policies that the rows came from, or all that came from them, by version."""
        reach = self.graph.ancestors if direction == "up" else self.graph.descendants
        works = {work.key: work for root in self.roots for work in reach(root.key) if "policies" in work.tables}
        return sorted(works.values(), key=lambda work: (policy_version(work), work.key))


def trace_lineage(frames: Frames, text: str, directions: list[str], kind: str = "") -> Lineage:
    """Return the lineage of an id within the rows of `frames`. Raises UnknownId."""
    start = identify(frames, text, kind)
    trees = {direction: traverse(frames, start, up=direction == "up") for direction in directions}
    return Lineage(text, start.roots, trees, frames.graph)


def as_values(lineage: Lineage) -> dict[str, Any]:
    """Return a lineage as plain JSON values: rows, edges from lower to further rows, policies and all the work.

    Each work has its config section and the versions of the code that made it.
    """
    graph, roots = lineage.graph, lineage.roots
    values: dict[str, Any] = {"id": lineage.id, "kind": roots[0].kind, "roots": [_name(node) for node in roots]}
    for direction, tree in lineage.trees.items():
        values[direction] = {
            "rows": [_row(node, facts, graph.works[node.key]) for node, facts in tree.facts.items()],
            "edges": [[_name(node), _name(far)] for node, reached in tree.next.items() for far in reached],
            "policies": [
                {"key": work.key, "version": policy_version(work), "names": policy_names(work)}
                for work in lineage.policies(direction)
            ],
        }
    keys = dict.fromkeys(node.key for tree in lineage.trees.values() for node in tree.facts)
    works = sorted((graph.works[key] for key in keys), key=lambda work: (work.step, work.entry.finished_at))
    return values | {"works": [work.description() for work in works]}


def _name(node: RowNode) -> str:
    return f"{node.kind}:{node.id}@{node.key}"


def _row(node: RowNode, facts: dict[str, Any], work: Work) -> dict[str, Any]:
    about = {"name": _name(node), "kind": node.kind, "id": node.id, "key": node.key, "stage": work.stage}
    return {**about, "step": work.step, "runs": list(work.runs), "computed_by": work.computed_by, "facts": facts}


def lines(lineage: Lineage) -> Iterator[str]:
    """Yield a lineage as lines for people: a tree in each direction, and the policies before or after it."""
    graph = lineage.graph
    for direction, tree in lineage.trees.items():
        up = direction == "up"
        yield f"{_title(lineage.roots[0], graph)} {'came from' if up else 'became'}:"
        for root in lineage.roots:
            yield from _branches(tree, root, graph, "", "", set())
        versions: dict[str, list[int]] = {}
        for work in lineage.policies(direction):
            for run in work.runs:
                versions.setdefault(run, []).append(policy_version(work))
        for run, of_run in sorted(versions.items()):
            sense = "Policies before it" if up else "Policies that go back to it"
            count = f" to {of_run[-1]} ({len(of_run)})" if len(of_run) > 1 else ""
            yield f"{sense}, of {run}: {of_run[0]}{count}"
        yield ""


def _title(node: RowNode, graph: Graph) -> str:
    """Return what a row is and how commands call it."""
    key = node.key[:KEY]
    names = {"row": f"{key}/{node.id}", "policy": " = ".join((*policy_names(graph.works[node.key]), key))}
    return f"{node.kind} {names.get(node.kind, node.id)}"


def _row_line(node: RowNode, facts: dict[str, Any], graph: Graph) -> str:
    """Return a row in one line: what it is, the values that it has, and the work of which runs made it."""
    values = [(name, facts[name]) for name in KINDS[node.kind].columns if facts[name] not in (None, "", [])]
    text = ", ".join(one_line(f"{name} {cell(name, value)}", MAX_VALUE_CHARS) for name, value in values)
    work = graph.works[node.key]
    return f"{_title(node, graph)}: {text}  [{work.stage} {work.key[:KEY]}, step {work.step} of {', '.join(work.runs)}]"


def _branches(tree: RowTree, node: RowNode, graph: Graph, first: str, rest: str, seen: set[RowNode]) -> Iterator[str]:
    # A row that is reached by two ways is printed in full once: the tree would grow with every way.
    again = node in seen and bool(tree.next.get(node))
    yield first + _row_line(node, tree.facts[node], graph) + (" (as above)" if again else "")
    if again:
        return
    seen.add(node)
    below = list(dict.fromkeys(tree.next.get(node, [])))
    for place, lower in enumerate(below[:MOST_SIBLINGS]):
        mark, bar = ("└", " ") if place == len(below) - 1 else ("├", "│")
        yield from _branches(tree, lower, graph, f"{rest}{mark}─ ", f"{rest}{bar}  ", seen)
    if len(below) > MOST_SIBLINGS:
        yield f"{rest}└─ ... and {len(below) - MOST_SIBLINGS} more (--json has all)"
