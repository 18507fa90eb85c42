"""Telling: one line for a row, or for a piece of work, of a lineage."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flows.views.identify import WORK, policy_names
from storage.read.lineage import Graph, Work
from tasks.hops import Node
from tasks.inference.sampling.failures import STRAGGLER

KEY = 8
"""Characters of a key that are shown; as many name it in a command."""
Facts = Mapping[str, Any]


def tell(node: Node, facts: Facts, graph: Graph) -> str:
    """Return a row in one line: what it is, its numbers, and which work of which runs made it."""
    work = graph.works[node.key]
    if node.kind == WORK:
        return tell_work(work)
    return f"{title_of(node, graph)}: {TOLD[node.kind](node, facts, graph)}  [{tell_work(work)}]"


def title_of(node: Node, graph: Graph) -> str:
    """Return what a row is and how it is called."""
    if node.kind == WORK:
        return f"{node.id} {node.key[:KEY]}"
    return node.kind if node.kind == "verdict" else f"{node.kind} {name_of(node, graph)}"


def tell_work(work: Work) -> str:
    """Return a piece of work in a few words."""
    unfinished = "" if work.finished else ", not finished"
    return f"{work.stage} {work.key[:KEY]}, step {work.step} of {', '.join(work.runs)}{shared(work)}{unfinished}"


def shared(work: Work) -> str:
    """Say who computed a work that several runs use."""
    return f"; computed by {work.computed_by}" if set(work.runs) != {work.computed_by} else ""


def name_of(node: Node, graph: Graph) -> str:
    """Return how a row is called in commands."""
    work = graph.works[node.key]
    if node.kind == "row":
        return f"{node.key[:KEY]}/{node.id}"
    return " = ".join((*policy_names(work), node.key[:KEY])) if node.kind == "policy" else node.id


def policy(key: str, graph: Graph) -> str:
    """Return how a policy is called, by its key."""
    return f"policy {policy_names(graph.works[key])[0]}" if key in graph.works else f"policy {key[:KEY]}"


def number(value: float | None) -> str:
    """Return a number in few digits; a missing one is not zero."""
    return "none" if value is None else f"{value:.4g}"


def flat(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the leaves of a config section with their dotted names."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from flat(item, f"{path}.{name}" if path else name)
    elif isinstance(value, Sequence) and value and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from flat(item, f"{path}.{index}")
    else:
        yield path, value


def _assignment(node: Node, facts: Facts, graph: Graph) -> str:
    return f"seed {facts['seed']}"


def _example(node: Node, facts: Facts, graph: Graph) -> str:
    return f"split {facts['split']}"


def _trace(node: Node, facts: Facts, graph: Graph) -> str:
    failed = "stopped" if facts["error_class"] == STRAGGLER else f"failed, {facts['error_class']}"
    ended = failed if facts["error_class"] else f"reward {number(facts['reward'])}"
    sampled = f", by {policy(facts['policy_key'], graph)}" if facts["policy_key"] else ""  # else it was demonstrated
    stale = f", {facts['staleness']} steps stale" if facts["staleness"] else ""
    return f"{ended}{sampled}{stale}"


def _verdict(node: Node, facts: Facts, graph: Graph) -> str:
    noted = [name for name in facts["detected"] if name != facts["reason"]]
    noted_too = f" (noted: {', '.join(noted)})" if noted else ""
    return ("kept" if facts["keep"] else f"left out by {facts['reason']}") + noted_too


def _sample(node: Node, facts: Facts, graph: Graph) -> str:
    names = ("advantage", "reward", "baseline")
    return ", ".join(f"{name} {number(facts[name])}" for name in names) + f", {facts['num_tokens']} tokens"


def _row(node: Node, facts: Facts, graph: Graph) -> str:
    return f"{len(facts['sample_ids'])} samples, for update {facts['update']}"


def _update(node: Node, facts: Facts, graph: Graph) -> str:
    numbers = ", ".join(f"{name.replace('_', ' ')} {number(facts[name])}" for name in ("loss", "grad_norm"))
    return f"{numbers}, from {policy(facts['policy_key_in'], graph)}"


def _policy(node: Node, facts: Facts, graph: Graph) -> str:
    return f"weights {facts['weights_sha256'][:16]}"


TOLD: dict[str, Callable[[Node, Facts, Graph], str]] = {
    "example": _example,
    "assignment": _assignment,
    "trace": _trace,
    "verdict": _verdict,
    "sample": _sample,
    "row": _row,
    "update": _update,
    "policy": _policy,
}
