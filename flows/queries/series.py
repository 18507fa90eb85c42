"""The numbers of a run by step, as its steps wrote them into the table `metrics`."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from flows.queries.step_history import RecordedStep
from flows.queries.step_metrics import Span, ledger_metrics, read_metrics
from flows.queries.store_reader import StoreReader, each_once
from storage.refs import Entry
from tasks.metrics.figures import Values, full_name

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


def numbers(library: StoreReader, run: str) -> list[StepNumbers]:
    """Return what was measured of every step of a run. Raises NotThere.

    They are those of the table `metrics`, and `ledger_metrics` of the stages that are done beside them: of a step that
    is not finished these alone.
    """
    found = library.history(run).sampled_steps
    written = written_metrics(library, found)
    return [
        StepNumbers(each, {**values, **ledger_metrics(_spans(each))})
        for each, values in zip(found, written, strict=True)
    ]


def written_metrics(library: StoreReader, steps: Sequence[RecordedStep]) -> list[Values]:
    """Return the metrics of some steps, none of those that are not finished; what was read once is not read again."""
    works = {each.metrics.identity: each.metrics for each in steps if each.metrics is not None}

    def read(names: list[tuple[str, ...]]) -> dict[tuple[str, ...], Values]:
        values = read_metrics(library.frames(), [works[name] for name in names])
        return {name: values.get(works[name].key, {}) for name in names}

    known = each_once(library, "metrics", list(works), read)
    return [known[each.metrics.identity] if each.metrics is not None else {} for each in steps]


def steps(library: StoreReader, run: str) -> pl.DataFrame:
    """Return one row for each step of a run: run, step, finished, and every number as a column by its full name.

    A column is null where a step did not measure it. Raises NotThere.
    """
    rows = [
        {"run": run, "step": each.step, "finished": each.work.finished}
        | {full_name(*name): value for name, value in sorted(each.values.items())}
        for each in numbers(library, run)
    ]
    first = {"run": pl.String, "step": pl.Int64, "finished": pl.Boolean}
    named = sorted({name for row in rows for name in row} - set(first))
    return pl.DataFrame(rows, schema=first | dict.fromkeys(named, pl.Float64))


def series(library: StoreReader, run: str) -> pl.DataFrame:
    """Return one row for each number of each step: run, step, finished, scope, name, value. Raises NotThere."""
    rows = [
        (run, each.step, each.work.finished, scope, name, value)
        for each in numbers(library, run)
        for (scope, name), value in sorted(each.values.items())
    ]
    return pl.DataFrame(rows, schema=LONG | {"value": pl.Float64}, orient="row")


def _spans(step: RecordedStep) -> list[Span]:
    """Return what the ledger says of the work of a step that is done."""
    return [Span(each.stage, _seconds_of(each.entry), each.entry.tokens) for each in step.works if each.finished]


def _seconds_of(entry: Entry) -> float:
    return (entry.finished_at - entry.started_at).total_seconds()
