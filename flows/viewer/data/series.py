"""The numbers of a run by step, out of its tables: one look at each table, and only for what was not read before."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from configs.filters import filter_name
from flows.viewer.data.run_steps import StepWork, steps_of
from flows.viewer.data.series_accounts import Ends, Packed, account_numbers, ends_of, packed_of
from flows.viewer.data.series_rollouts import COLUMNS, OF_VERDICTS, Numbers, metric, rollout_numbers
from flows.viewer.data.series_updates import update_numbers
from flows.viewer.data.shared_reads import each_once
from flows.viewer.library import Library
from storage.read.lineage import Work
from storage.refs import Entry

READ_OF_VERDICTS = (*OF_VERDICTS, "reason")
LONG = {"run": pl.String, "step": pl.Int64, "finished": pl.Boolean, "scope": pl.String, "name": pl.String}


@dataclass(frozen=True)
class StepNumbers:
    """One step of a run and what was measured."""

    work: StepWork
    values: Numbers
    """By scope (an environment, `all`, or empty) and measure. What was not measured has no entry."""

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.work.step

    def value(self, measure: str, scope: str = "") -> float | None:
        """Return one number; None where it was not measured."""
        return self.values.get((scope, measure))


@dataclass(frozen=True)
class _OfRollouts:
    """What the rollouts of a step and their verdicts say."""

    values: Numbers
    ends: Ends


def numbers(library: Library, run: str) -> list[StepNumbers]:
    """Return what was measured of every step of a run, unfinished ones as far as they are. Raises NotThere.

    Names and values are those of `flows.metrics.step_metrics`, `accounting/...` included, and beside them: `kept`
    (share of verdicts that keep), `longest_output`, `updates/...` (see `update_numbers`), `tokens/stage/...` and
    `tokens_per_second/...`.
    """
    found = steps_of(library, run)
    filters = tuple(filter_name(each) for each in library.config(run).filtering.filters)
    measured = _of_rollouts(library, found, filters)
    trained = update_numbers(library, [each.updates for each in found if each.updates])
    after = packed_of(library, found)
    return [
        StepNumbers(each, _together(each, measured[each.name], packed, trained))
        for each, packed in zip(found, after, strict=True)
    ]


def steps(library: Library, run: str) -> pl.DataFrame:
    """Return one row for each step of a run: run, step, finished, and every number as a column by its full name.

    A column is null where a step did not measure it. Raises NotThere.
    """
    rows = [
        {"run": run, "step": each.step, "finished": each.work.finished}
        | {metric(*name): value for name, value in sorted(each.values.items())}
        for each in numbers(library, run)
    ]
    first = {"run": pl.String, "step": pl.Int64, "finished": pl.Boolean}
    named = sorted({name for row in rows for name in row} - set(first))
    return pl.DataFrame(rows, schema=first | dict.fromkeys(named, pl.Float64))


def series(library: Library, run: str) -> pl.DataFrame:
    """Return one row for each number of each step: run, step, finished, scope, name, value. Raises NotThere."""
    rows = [
        (run, each.step, each.work.finished, scope, name, value)
        for each in numbers(library, run)
        for (scope, name), value in sorted(each.values.items())
    ]
    return pl.DataFrame(rows, schema=LONG | {"value": pl.Float64}, orient="row")


def _of_rollouts(
    library: Library, found: Sequence[StepWork], filters: tuple[str, ...]
) -> dict[tuple[str, ...], _OfRollouts]:
    """Return the numbers of steps' rollouts by what names them; what was read once is not read again."""
    works = {each.name: each for each in found}

    def read(names: list[tuple[str, ...]]) -> dict[tuple[str, ...], _OfRollouts]:
        return _read(library, [works[name] for name in names], filters)

    return each_once(library, ("numbers of rollouts", filters), list(works), read)


def _read(library: Library, wanted: Sequence[StepWork], filters: tuple[str, ...]) -> dict[tuple[str, ...], _OfRollouts]:
    """Read the rollouts of some steps and their verdicts, each table once."""
    traces = _rows(library, "traces", COLUMNS, {str(n): each.traces for n, each in enumerate(wanted)})
    judged = {str(n): (each.verdicts,) for n, each in enumerate(wanted) if each.verdicts}
    verdicts = _rows(library, "verdicts", READ_OF_VERDICTS, judged)
    ends = ends_of(traces, verdicts)
    made = rollout_numbers(traces, verdicts.drop("reason"), dict.fromkeys(judged, filters))
    for step, kept in verdicts.group_by("step").agg(pl.col("keep").mean()).iter_rows():
        made.setdefault(step, {})["", "kept"] = kept
    return {each.name: _OfRollouts(made.get(str(n), {}), ends.get(str(n), {})) for n, each in enumerate(wanted)}


def _rows(library: Library, table: str, columns: Sequence[str], by_step: Mapping[str, Iterable[Work]]) -> pl.DataFrame:
    """Return rows with the column `step`, the name of a step in `by_step`, in place of their key."""
    works = {work.key: work for own in by_step.values() for work in own}
    steps = pl.DataFrame(
        [(step, work.key) for step, own in by_step.items() for work in own],
        schema={"step": pl.String, "key": pl.String},
        orient="row",
    )
    rows = library.frames().of(works.values(), table).select(columns).collect()
    return rows.join(steps, on="key").drop("key")


def _together(
    work: StepWork, sampled: _OfRollouts, packed: Packed, trained: Mapping[str, Mapping[str, float]]
) -> Numbers:
    """Return all numbers of a step: of its rollouts, of its training, and of its stages out of the ledger."""
    of_update = trained.get(work.updates.key, {}) if work.updates else {}
    of_step = {**of_update, **account_numbers(sampled.ends, packed)}
    found = {**sampled.values, **{("", name): value for name, value in of_step.items()}}
    spans: dict[str, list[tuple[float, int]]] = {}
    for each in work.works:
        if each.finished:
            entry = each.entry
            spans.setdefault(each.stage, []).append((seconds_of(entry), entry.tokens))
    for stage, own in spans.items():
        seconds, tokens = sum(each for each, _ in own), sum(count for _, count in own)
        found["", f"timing/stage/{stage}"] = seconds
        if tokens:
            found["", f"tokens/stage/{stage}"] = float(tokens)
        if tokens and seconds > 0:
            found["", f"tokens_per_second/{stage}"] = tokens / seconds
    return found


def seconds_of(entry: Entry) -> float:
    """Return the wall-clock of finished work."""
    return (entry.finished_at - entry.started_at).total_seconds()
