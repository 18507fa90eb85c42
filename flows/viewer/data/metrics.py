"""Every number of a run's steps as a series of its own: by measure, in groups, each with its scopes."""

from collections.abc import Iterable, Sequence
from typing import Any

from flows.viewer.data.metric_words import about
from flows.viewer.data.series import StepNumbers
from tasks.metrics.names import ALL, full_name

ORDER = (
    *("reward", "metrics", "update", "updates", "rollouts", "accounting", "filters", "trainable"),
    *("errored_rollout", "stragglers", "timing", "tokens", "tokens_per_second"),
)
"""Groups in which most is looked for come first; any others follow."""
LOOSE = "rollouts"
"""The group of measures whose names have one part."""
SHARES = ("errored_rollout", "stragglers")
"""What has no entry where it is zero, though the rollouts were counted; `accounting` is like it."""
Metric = dict[str, Any]


def metrics(steps: Sequence[StepNumbers]) -> list[Metric]:
    """Return every measure of some steps, in the order of its group: `name`, `group`, `unit`, `told` and `series`.

    A series has `scope` (an environment, `all`, or empty), `name` (as W&B has it), and `values` by step,
    None where there is none. Of a single environment only all are told: that is the same.
    """
    columns = _Columns(steps)
    scopes: dict[str, set[str]] = {}
    for scope, measure in columns.values:
        scopes.setdefault(measure, set()).add(scope)
    several = len({scope for own in scopes.values() for scope in own} - {"", ALL}) > 1
    heads = {name.partition("/")[0] for name in scopes if "/" in name}
    groups = {name: head if (head := name.partition("/")[0]) in heads else LOOSE for name in scopes}
    found = [_metric(columns, name, _shown(own, several), groups[name]) for name, own in scopes.items()]
    return sorted(found, key=lambda each: (_rank(each["group"]), each["name"]))


def matching(found: Iterable[Metric], text: str) -> list[Metric]:
    """Return the measures in whose names and descriptions all words of a text are."""
    words = text.casefold().split()
    return [each for each in found if all(word in said(each) for word in words)]


def said(each: Metric) -> str:
    """Return what is searched of a measure."""
    names = (one["name"] for one in each["series"])
    return " ".join((each["name"], each["unit"], each["told"], *names)).casefold()


def ends(values: Sequence[float | None], steps: Sequence[int]) -> dict[str, Any]:
    """Return the first, the last, the least and the most of a series with their steps; None without any value.

    What is not finite is the first or the last, but never the least or the most.
    """
    known = [(value, step) for value, step in zip(values, steps, strict=True) if value is not None]
    finite = [pair for pair in known if abs(pair[0]) < float("inf")]
    picked = {
        "first": known[0] if known else None,
        "last": known[-1] if known else None,
        "least": min(finite, key=lambda pair: pair[0], default=None),
        "most": max(finite, key=lambda pair: pair[0], default=None),
    }
    return {name: pair and {"value": pair[0], "step": pair[1]} for name, pair in picked.items()}


class _Columns:
    """The numbers of steps by name instead of by step: gone through once, for there are many of both."""

    def __init__(self, steps: Sequence[StepNumbers]) -> None:
        self.values: dict[tuple[str, str], list[float | None]] = {}
        self._accounted = [False] * len(steps)
        for place, each in enumerate(steps):
            for name, value in each.values.items():
                if name not in self.values:
                    self.values[name] = [None] * len(steps)
                self.values[name][place] = value
        for (_, measure), values in self.values.items():
            if measure.startswith("accounting/"):
                self._accounted = [
                    known or value is not None for known, value in zip(self._accounted, values, strict=True)
                ]

    def filled(self, scope: str, measure: str) -> list[float | None]:
        """Return a measure by step, with the zeros that have no entry."""
        values = self.values[scope, measure]
        head = measure.partition("/")[0]
        if head == "accounting":
            return _where(self._accounted, values)
        if head in SHARES and (scope, "rollouts") in self.values:
            return _where([each is not None for each in self.values[scope, "rollouts"]], values)
        return values


def _where(counted: Iterable[bool], values: Iterable[float | None]) -> list[float | None]:
    return [0.0 if value is None and there else value for value, there in zip(values, counted, strict=True)]


def _shown(scopes: set[str], several: bool) -> list[str]:
    """Return the scopes that are told, all rollouts first."""
    alone = not several and ALL in scopes
    return sorted(scopes, key=lambda scope: (scope not in ("", ALL), scope))[: 1 if alone else None]


def _metric(columns: _Columns, name: str, scopes: Sequence[str], group: str) -> Metric:
    series = [
        {"scope": scope, "name": full_name(scope, name), "values": columns.filled(scope, name)} for scope in scopes
    ]
    return {"name": name, "group": group, **about(name)._asdict(), "series": series}


def _rank(group: str) -> tuple[int, str]:
    return (ORDER.index(group) if group in ORDER else len(ORDER), group)
