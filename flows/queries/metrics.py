"""The numbers of a run's steps: as they were written, as frames, and as series in groups, with unit and meaning.

Nothing is computed here that a row of table `metrics` could say. Only wall-clock is of the ledger, for it is of one
attempt at some work: `timing/stage/...` in seconds, `tokens/stage/...`, and `tokens_per_second/...` of stages that
handled tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from flows.queries.step_history import RecordedStep
from flows.queries.store_reader import StoreReader
from flows.reporting.figures import about
from storage.read.frames import Frames
from storage.read.lineage import Work
from storage.refs import Entry
from tasks.metrics.figures import ALL, Values, full_name


@dataclass(frozen=True)
class Span:
    """What the ledger says of one piece of finished work, or of all of a stage."""

    stage: str
    seconds: float
    tokens: int


def read_metrics(frames: Frames, works: Iterable[Work], where: pl.Expr | bool = True) -> dict[str, Values]:
    """Return the metrics that some works have written, by key, in one look at the table; of other works none.

    Only those that meet a condition: a step has a hundred, and a long run is shown by a few.
    """
    rows = frames.rows(works, "metrics").select("key", "scope", "name", "value").filter(where)
    # A key at a time, and columns as lists: of 300,000 rows one object each would take seconds.
    by_key = rows.collect().partition_by("key", as_dict=True, include_key=False)
    return {
        str(key): dict(zip(zip(own["scope"], own["name"], strict=True), own["value"], strict=True))
        for (key,), own in by_key.items()
    }


def ledger_metrics(spans: Sequence[Span]) -> Values:
    """Return seconds, tokens and tokens a second of the stages of a step."""
    found: Values = {}
    for stage, span in by_stage(spans).items():
        found["", f"timing/stage/{stage}"] = span.seconds
        if span.tokens:
            found["", f"tokens/stage/{stage}"] = float(span.tokens)
        if span.tokens and span.seconds > 0:
            found["", f"tokens_per_second/{stage}"] = span.tokens / span.seconds
    return found


def by_stage(spans: Iterable[Span]) -> dict[str, Span]:
    """Return the sums of each stage, in the order in which the stages come first."""
    found: dict[str, Span] = {}
    for span in spans:
        known = found.get(span.stage, Span(span.stage, 0.0, 0))
        found[span.stage] = Span(span.stage, known.seconds + span.seconds, known.tokens + span.tokens)
    return found


LONG = {"run": pl.String, "step": pl.Int64, "finished": pl.Boolean, "scope": pl.String, "name": pl.String}


@dataclass(frozen=True)
class StepNumbers:
    """One step of a run and what was measured."""

    work: RecordedStep
    values: Values
    """By scope (an environment, `all`, or empty) and measure. What was not measured has no entry."""

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.work.step

    def value(self, measure: str, scope: str = "") -> float | None:
        """Return one number; None where it was not measured."""
        return self.values.get((scope, measure))


def numbers(reader: StoreReader, run: str) -> list[StepNumbers]:
    """Return what was measured of every step of a run. Raises NotThere.

    They are those of the table `metrics`, and `ledger_metrics` of the stages that are done beside them: of a step that
    is not finished these alone.
    """
    found = reader.history(run).sampled_steps
    written = written_metrics(reader, found)
    return [
        StepNumbers(each, {**values, **ledger_metrics([_span(work.entry) for work in each.works if work.finished])})
        for each, values in zip(found, written, strict=True)
    ]


def _span(entry: Entry) -> Span:
    return Span(entry.stage, (entry.finished_at - entry.started_at).total_seconds(), entry.tokens)


def written_metrics(reader: StoreReader, steps: Sequence[RecordedStep]) -> list[Values]:
    """Return the metrics of some steps, none of those that are not finished; what was read once is not read again."""
    works = {each.metrics.identity: each.metrics for each in steps if each.metrics is not None}

    def read(names: list[tuple[str, ...]]) -> dict[tuple[str, ...], Values]:
        values = read_metrics(reader.frames(), [works[name] for name in names])
        return {name: values.get(works[name].key, {}) for name in names}

    known = reader.cache.each_once("metrics", list(works), read)
    return [known[each.metrics.identity] if each.metrics is not None else {} for each in steps]


def steps(reader: StoreReader, run: str) -> pl.DataFrame:
    """Return one row for each step of a run: run, step, finished, and every number as a column by its full name.

    A column is null where a step did not measure it. Raises NotThere.
    """
    rows = [
        {"run": run, "step": each.step, "finished": each.work.finished}
        | {full_name(*name): value for name, value in sorted(each.values.items())}
        for each in numbers(reader, run)
    ]
    first = {"run": pl.String, "step": pl.Int64, "finished": pl.Boolean}
    named = sorted({name for row in rows for name in row} - set(first))
    return pl.DataFrame(rows, schema=first | dict.fromkeys(named, pl.Float64))


def series(reader: StoreReader, run: str) -> pl.DataFrame:
    """Return one row for each number of each step: run, step, finished, scope, name, value. Raises NotThere."""
    rows = [
        (run, each.step, each.work.finished, scope, name, value)
        for each in numbers(reader, run)
        for (scope, name), value in sorted(each.values.items())
    ]
    return pl.DataFrame(rows, schema=LONG | {"value": pl.Float64}, orient="row")


ORDER = (
    *("reward", "rewards", "metrics", "update", "updates", "rollouts", "accounting", "filters", "trainable"),
    *("errored_rollout", "stale", "stragglers", "stream", "timing", "tokens", "tokens_per_second"),
)
"""Groups in which most is looked for come first; any others follow."""
LOOSE = "rollouts"
"""The group of measures whose names have one part."""
SHARES = ("errored_rollout", "stale", "stragglers")
"""What has no entry where it is zero, though the rollouts were counted; `accounting` is like it."""
Metric = dict[str, Any]


def metrics(steps: Sequence[StepNumbers]) -> list[Metric]:
    """Return every measure of some steps, by group: `name`, `group`, `unit`, `description` and `series`.

    A series has `scope` (an environment, `all`, or empty), `name` (as W&B has it), and `values` by step,
    None where there is none. With a single environment only the scope `all` is returned: its values are the same.
    """
    columns = Columns(steps)
    scopes: dict[str, set[str]] = {}
    for scope, measure in columns.values:
        scopes.setdefault(measure, set()).add(scope)
    several = len({scope for own in scopes.values() for scope in own} - {"", ALL}) > 1
    heads = {name.partition("/")[0] for name in scopes if "/" in name}
    groups = {name: head if (head := name.partition("/")[0]) in heads else LOOSE for name in scopes}
    found = [_metric(columns, name, _scopes_to_show(own, several), groups[name]) for name, own in scopes.items()]
    return sorted(found, key=lambda each: (_rank(each["group"]), each["name"]))


def matching(found: Sequence[Metric], text: str) -> list[Metric]:
    """Return the measures in whose names and descriptions all words of a text are."""
    words = text.casefold().split()
    texts = [
        (each["name"], each["unit"], each["description"], *(one["name"] for one in each["series"])) for each in found
    ]
    return [
        each
        for each, text in zip(found, texts, strict=True)
        if all(word in " ".join(text).casefold() for word in words)
    ]


def ends(values: Sequence[float | None], steps: Sequence[int]) -> dict[str, Any]:
    """Return the first, the last, the least and the most of a series with their steps; None without any value.

    What is not finite is the first or the last, but never the least or the most.
    """
    known = [(value, step) for value, step in zip(values, steps, strict=True) if value is not None]
    # One infinite value would be the most for ever; NaN compares with nothing.
    finite = [pair for pair in known if abs(pair[0]) < float("inf")]
    picked = {
        "first": known[0] if known else None,
        "last": known[-1] if known else None,
        "least": min(finite, key=lambda pair: pair[0], default=None),
        "most": max(finite, key=lambda pair: pair[0], default=None),
    }
    return {name: pair and {"value": pair[0], "step": pair[1]} for name, pair in picked.items()}


class Columns:
    """The numbers of steps by name instead of by step: gone through once, for there are many of both."""

    def __init__(self, steps: Sequence[StepNumbers]) -> None:
        self.values: dict[tuple[str, str], list[float | None]] = {}
        self._num_steps = len(steps)
        for place, each in enumerate(steps):
            for name, value in each.values.items():
                if name not in self.values:
                    self.values[name] = [None] * len(steps)
                self.values[name][place] = value
        accounts = [values for (_, name), values in self.values.items() if name.startswith("accounting/")]
        self._accounted = [any(value is not None for value in counts) for counts in zip(*accounts, strict=True)]

    def series(self, scope: str, measure: str) -> list[float | None]:
        """Return a measure by step, None where it was not measured; what was counted and has no entry is zero."""
        values = self.values.get((scope, measure), [None] * self._num_steps)
        # A step that counted its rollouts and has no entry had none of that kind: zero, and not unknown.
        head = measure.partition("/")[0]
        if head == "accounting":
            return _where(self._accounted, values)
        if head in SHARES and (scope, measure) in self.values and (scope, "rollouts") in self.values:
            return _where([count is not None for count in self.values[scope, "rollouts"]], values)
        return values


def _where(counted: Iterable[bool], values: Iterable[float | None]) -> list[float | None]:
    return [0.0 if value is None and there else value for value, there in zip(values, counted, strict=True)]


def _scopes_to_show(scopes: set[str], several: bool) -> list[str]:
    """Return the scopes that are shown, all rollouts first."""
    # Of one environment alone its numbers are those of all, and a second curve would hide the first.
    alone = not several and ALL in scopes
    return sorted(scopes, key=lambda scope: (scope not in ("", ALL), scope))[: 1 if alone else None]


def _metric(columns: Columns, name: str, scopes: Sequence[str], group: str) -> Metric:
    series = [
        {"scope": scope, "name": full_name(scope, name), "values": columns.series(scope, name)} for scope in scopes
    ]
    return {"name": name, "group": group, **about(name)._asdict(), "series": series}


def _rank(group: str) -> tuple[int, str]:
    return (ORDER.index(group) if group in ORDER else len(ORDER), group)
