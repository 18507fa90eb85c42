"""Addresses of pages, and what a page is before anybody lays it out.

Addresses stay right: nothing but the store's own names is in them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode


@dataclass(frozen=True)
class Page:
    """What a page says. `values` are all of it, as plain JSON values: the template lays out nothing else."""

    template: str
    """The file in `templates`."""
    title: str
    values: Mapping[str, Any]
    crumbs: Sequence[tuple[str, str]] = ()
    """The way to the page: names with their addresses."""
    live: bool = False
    """Whether it may change while somebody looks: a run that is going on."""
    quiet: bool = False
    """Whether it follows without saying so, as nothing is going just now."""


def runs() -> str:
    """All runs."""
    return "/"


def run(name: str) -> str:
    """A run."""
    return f"/runs/{_part(name)}"


def curves(name: str, *others: str) -> str:
    """The charts of a run, with those of others in them."""
    return f"{run(name)}{_question({'with': ','.join(others)})}#reward"


def metric(of_run: str, name: str) -> str:
    """A number of a run by step; `name` is that of its measure: `reward/mean`."""
    return f"{run(of_run)}/metrics/{_part(name)}"


def step(of_run: str, number: int, **question: str) -> str:
    """A step of a run; the question filters its traces, as `pages.step` knows it."""
    return f"{run(of_run)}/steps/{number}{_question(question)}"


def evaluation(of_run: str, version: int, **question: str) -> str:
    """What a run's policy of a version did on held-out examples."""
    return f"{run(of_run)}/evaluations/{version}{_question(question)}"


def batch(of_run: str, number: int) -> str:
    """The packed batch of a step."""
    return f"{step(of_run, number)}/batch"


def row(of_run: str, number: int, which: int) -> str:
    """A row of the batch of a step."""
    return f"{batch(of_run, number)}/{which}"


def trace(of_run: str, trace_id: str, key: str = "", **question: str) -> str:
    """A trace as a run uses it; `key` is the work that made it, which saves a search."""
    hint = {"key": key} if key else {}
    return f"{run(of_run)}/traces/{_part(trace_id)}{_question(hint | question)}"


def any_trace(trace_id: str) -> str:
    """A trace, whichever runs use it."""
    return f"/traces/{_part(trace_id)}"


def example(of_run: str, environment: str, example_id: str) -> str:
    """All attempts at an example over the history of a run."""
    return f"{run(of_run)}/example{_question({'environment': environment, 'id': example_id})}"


def search(of_run: str, condition: str = "") -> str:
    """The rollouts of a run that meet a condition, or hold a text; see `queries.conditions.search_condition`."""
    return f"{run(of_run)}/search{_question({'q': condition})}"


def changes(of_run: str, a: int | str = "", b: int | str = "") -> str:
    """What changed between two policies of a run, by their versions; without them the first and the last."""
    return f"{run(of_run)}/changes{_question({'a': str(a), 'b': str(b)})}"


def compare(a: str, b: str) -> str:
    """Two runs side by side."""
    return f"/compare/{_part(a)}/{_part(b)}"


def compare_choice(a: str = "", b: str = "") -> str:
    """Where a form sends the two runs that were chosen in it."""
    return f"/compare{_question({'a': a, 'b': b})}"


def compare_step(a: str, b: str, number: int) -> str:
    """The same step of two runs."""
    return f"{compare(a, b)}/steps/{number}"


def compare_example(a: str, b: str, environment: str, example_id: str, **question: str) -> str:
    """The same example as two runs, or two policies, tried it."""
    named = {"environment": environment, "id": example_id}
    return f"{compare(a, b)}/example{_question(named | question)}"


def _part(text: str) -> str:
    return quote(text, safe="")


def _question(values: dict[str, str]) -> str:
    kept = {name: value for name, value in values.items() if value != ""}
    return f"?{urlencode(kept)}" if kept else ""
