"""Addresses of pages: one table of routes, each of which writes its addresses and reads them; and what a page is.

Addresses stay right: nothing but the store's own names is in them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlencode


@dataclass(frozen=True)
class Page:
    """The contents of a page. `values` are plain JSON values: all that its template reads."""

    template: str
    """The file in `templates`."""
    title: str
    values: Mapping[str, Any]
    crumbs: Sequence[tuple[str, str]] = ()
    """The way to the page: names with their addresses."""
    live: bool = False
    """Whether it may change while somebody looks: the run is going."""
    quiet: bool = False
    """Whether it follows the store without a sign, as no run is going."""


class Route:
    """The addresses of one kind of page.

    A part of the pattern in braces is a name or a number, `:path` one that may hold slashes. A call writes an address:
    the parts of the path in order, then the parameters named in `query`, then further ones by name; empty parameters
    are left out.
    """

    def __init__(self, pattern: str, *query: str) -> None:
        self.pattern = pattern
        self._query = query
        self._num_parts = pattern.count("{")
        self._format = re.sub(r"\{[^}]+\}", "{}", pattern)
        names = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)
        names = re.sub(r"\{(\w+):path\}", r"(?P<\1>.+)", names)
        self._expression = re.compile(names + ("" if ":path" in pattern else "/?"))

    def __call__(self, *values: str | int, **query: str | int) -> str:
        """Return an address."""
        parts, positional = values[: self._num_parts], values[self._num_parts :]
        path = self._format.format(*(quote(str(part), safe="") for part in parts))
        named = {**dict(zip(self._query, positional, strict=False)), **query}
        kept = {name: value for name, value in named.items() if value != ""}
        return path + (f"?{urlencode(kept)}" if kept else "")

    def read(self, path: str) -> dict[str, str] | None:
        """Return the parts of a path as it was written, by name; None for a path of another kind."""
        match = self._expression.fullmatch(path)
        return {name: unquote(part) for name, part in match.groupdict().items()} if match else None


runs = Route("/")
run = Route("/runs/{run}")
step = Route("/runs/{run}/steps/{step}")
evaluation = Route("/runs/{run}/evaluations/{step}")
batch = Route("/runs/{run}/steps/{step}/batch")
search = Route("/runs/{run}/search", "q")
changes = Route("/runs/{run}/changes", "a", "b")
rewards = Route("/runs/{run}/rewards", "name")
trace = Route("/runs/{run}/traces/{trace:path}", "key")
any_trace = Route("/traces/{trace:path}")
compare = Route("/compare", "a", "b")


def curves(name: str, *others: str) -> str:
    """Return the charts of a run, with those of others in them."""
    return run(name, **{"with": ",".join(others)}) + "#reward"


def metric(of_run: str, name: str) -> str:
    """Return the chart of one metric of a run, of all its scopes."""
    return run(of_run, metric=name) + "#metric-list"


def row(of_run: str, number: int, place: int) -> str:
    """Return a row of the packed batch of a step."""
    return batch(of_run, number, row=place) + "#row"


def example(of_run: str, environment: str, example_id: str) -> str:
    """Return the rollouts of a run at an example."""
    texts = (text.replace("'", "''") for text in (environment, example_id))
    return search(of_run, "environment = '{}' and example_id = '{}'".format(*texts))
