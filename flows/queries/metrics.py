"""The numbers of a run's steps: as they were written, as frames, and as series in groups, with unit and meaning.

Nothing is computed here that a row of table `metrics` could say. Only wall-clock is of the ledger, for it is of one
attempt at some work: `timing/stage/...` in seconds, `tokens/stage/...`, and `tokens_per_second/...` of stages that
handled tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from flows.queries.step_history import RecordedStep
from flows.queries.store_reader import StoreReader
from flows.reporting.figures import about
from storage.read.frames import Frames
from storage.read.lineage import Work
from tasks.metrics.figures import ALL, Values, full_name


class Span(NamedTuple):
    """The figures of the ledger of one piece of finished work, or of all of a stage."""

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


def ledger_metrics(spans: Iterable[Span]) -> Values:
    """Return seconds, tokens and tokens a second of the stages of a step, in the order in which they come first."""
    sums: dict[str, Span] = {}
    for span in spans:
        before = sums.get(span.stage, Span(span.stage, 0.0, 0))
        sums[span.stage] = Span(span.stage, before.seconds + span.seconds, before.tokens + span.tokens)
    values: Values = {}
    for stage, seconds, tokens in sums.values():
        values["", f"timing/stage/{stage}"] = seconds
        if tokens:
            values["", f"tokens/stage/{stage}"] = float(tokens)
        if tokens and seconds > 0:
            values["", f"tokens_per_second/{stage}"] = tokens / seconds
    return values


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


def numbers(reader: StoreReader, run: str, pattern: str = "") -> list[StepNumbers]:
    """Return what was measured of every step of a run. Raises NotThere.

    They are those of the table `metrics` whose names match the regular expression `pattern`, and `ledger_metrics` of
    the stages that are done beside them: of a step that is not finished these alone.
    """
    history = reader.history(run).sampled_steps
    return [
        StepNumbers(step, values | ledger_metrics(_span(work) for work in step.works if work.finished))
        for step, values in zip(history, written_metrics(reader, history, pattern), strict=True)
    ]


def _span(work: Work) -> Span:
    seconds = (work.entry.finished_at - work.entry.started_at).total_seconds()
    return Span(work.entry.stage, seconds, work.entry.tokens)


def written_metrics(reader: StoreReader, steps: Sequence[RecordedStep], pattern: str = "") -> list[Values]:
    """Return the metrics of some steps, none of those that are not finished; what was read once is not read again."""
    works = {step.metrics.identity: step.metrics for step in steps if step.metrics is not None}

    def read(names: list[tuple[str, ...]]) -> dict[tuple[str, ...], Values]:
        where = pl.col("name").str.contains(pattern) if pattern else True
        values = read_metrics(reader.frames(), [works[name] for name in names], where)
        return {name: values.get(works[name].key, {}) for name in names}

    written = reader.cache.each_once(("metrics", pattern), list(works), read)
    return [written[step.metrics.identity] if step.metrics is not None else {} for step in steps]


def steps(reader: StoreReader, run: str) -> pl.DataFrame:
    """Return one row for each step of a run: run, step, finished, and every number as a column by its full name.

    A column is null where a step did not measure it; those of rewards and updates come first. Raises NotThere.
    """
    measured = numbers(reader, run)
    every = {full_name(*name) for entry in measured for name in entry.values}
    names = sorted(every, key=lambda name: (not name.startswith(("reward", "update")), name))
    first = {"run": pl.String, "step": pl.Int64, "finished": pl.Boolean}
    rows = [
        {"run": run, "step": entry.step, "finished": entry.work.finished}
        | {full_name(*name): value for name, value in entry.values.items()}
        for entry in measured
    ]
    return pl.DataFrame(rows, schema=first | dict.fromkeys(names, pl.Float64))


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
    scopes: dict[str, list[str]] = {}
    for scope, measure in sorted(columns.values, key=lambda name: (name[0] not in ("", ALL), name)):
        scopes.setdefault(measure, []).append(scope)
    heads = {name.partition("/")[0] for name in scopes if "/" in name}
    groups = {name: head if (head := name.partition("/")[0]) in heads else LOOSE for name in scopes}
    found = [
        {"name": name, "group": groups[name], **about(name)._asdict()}
        | {
            "series": [
                {"scope": scope, "name": full_name(scope, name), "values": columns.series(scope, name)}
                # Of one environment alone its numbers are those of all, and a second curve would hide the first.
                for scope in (own if len(columns.scopes) > 1 or ALL not in own else [ALL])
            ]
        }
        for name, own in scopes.items()
    ]
    rank = {group: place for place, group in enumerate(ORDER)}
    return sorted(found, key=lambda row: (rank.get(row["group"], len(ORDER)), row["group"], row["name"]))


def matching(found: Sequence[Metric], text: str) -> list[Metric]:
    """Return the measure whose name a text is; without one, those that have all its words.

    Words are looked for in names, those of the series too, units and descriptions.
    """
    words = text.casefold().split()

    def says(row: Metric) -> str:
        names = (series["name"] for series in row["series"])
        return " ".join((row["unit"], row["description"], row["name"], *names)).casefold()

    named = [row for row in found if row["name"] == text]
    return named or [row for row in found if all(word in says(row) for word in words)]


class Columns:
    """The numbers of steps by name instead of by step: gone through once, for there are many of both."""

    def __init__(self, steps: Sequence[StepNumbers]) -> None:
        self.values: dict[tuple[str, str], list[float | None]] = {}
        self._none: list[float | None] = [None] * len(steps)
        for place, entry in enumerate(steps):
            for name, value in entry.values.items():
                self.values.setdefault(name, self._none[:])[place] = value
        self.scopes = sorted({scope for scope, _ in self.values} - {"", ALL})
        """The environments."""
        accounts = [values for (_, name), values in self.values.items() if name.startswith("accounting/")]
        self._accounted = [max(counts, key=_is_known) for counts in zip(*accounts, strict=True)]

    def series(self, scope: str, measure: str) -> list[float | None]:
        """Return a measure by step, None where it was not measured; what was counted and has no entry is zero."""
        values = self.values.get((scope, measure), self._none)
        head = measure.partition("/")[0]
        # A step that counted its rollouts and has no entry had none of that kind: zero, and not unknown.
        shared = head in SHARES and (scope, measure) in self.values
        counts = self._accounted if head == "accounting" else self.values.get((scope, "rollouts")) if shared else None
        return (
            values
            if counts is None
            else [
                0.0 if value is None and count is not None else value
                for value, count in zip(values, counts, strict=True)
            ]
        )


def _is_known(value: float | None) -> bool:
    return value is not None
