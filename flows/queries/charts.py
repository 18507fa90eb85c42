"""charts: the charts of a run's page, the rows of `flows/reporting/figures.toml` with what was measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import polars as pl

from flows.queries.metrics import Columns, StepNumbers
from flows.queries.rollout_search import run_rollouts
from flows.queries.store_reader import StoreReader
from flows.queries.views import select_from
from flows.reporting.figures import chart_rows
from flows.reporting.formats import environment_title
from tasks.metrics.figures import ALL
from tasks.stages import STEP_STAGES

AXES = ("step", "tokens", "time")
"""What curves may be drawn over: steps, tokens sampled so far, or minutes of work so far."""
CHART_KEYS = {"zero", "unit", "note"}
"""What a row of the file says of its charts, beside titles and series."""
Series = dict[str, Any]
Chart = dict[str, Any]


def charts(steps: Sequence[StepNumbers], evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return sections of charts; a chart without any value is left out. `evaluations` are those of `held_out`."""
    columns = Columns(steps)
    sections: dict[str, list[Chart]] = {}
    for row in chart_rows():
        drawn = [_held_out(evaluations)] if row.get("special") else _charts(columns, row)
        sections.setdefault(row["section"], []).extend(chart for chart in drawn if chart["series"])
    return [{"title": title, "charts": own} for title, own in sections.items()]


def _charts(columns: Columns, row: Mapping[str, Any]) -> Iterator[Chart]:
    """Yield the charts of a row of the file."""
    pattern = row.get("each", "")
    by_scope = pattern == "environment"
    names = [(scope, scope) for scope in columns.scopes] if by_scope else _matches(columns, pattern)
    for name, text in names:
        measures = [{**line, "measure": line["measure"].replace("{each}", name)} for line in row["series"]]
        lines = [series for line in measures for series in _lines(columns, line, name * by_scope)]
        yield _chart(row["title"].format(each=text), lines, **{key: row[key] for key in row.keys() & CHART_KEYS})


def _lines(columns: Columns, line: Mapping[str, Any], scope: str) -> Iterator[Series]:
    """Yield the series of a measure, of one scope or of those that the row names."""
    named = line.get("scope", "")
    environments = columns.scopes if named in ("environment", "every") and len(columns.scopes) > 1 else []
    scopes = [ALL] if named == "every" else [] if named == "environment" else [scope or named]
    for measure, text in _matches(columns, line["measure"], line.get("without")):
        for place, shown in enumerate((*scopes, *environments), 1 - len(scopes)):
            series = {"name": line.get("name") or text or shown, "measure": measure}
            # An environment has one colour in all charts, the first being that of all rollouts.
            series |= {"place": place} if shown in environments else {}
            series |= {"kind": line["kind"]} if "kind" in line else {}
            yield series | {"values": columns.series(shown, measure)} | _ends(columns, line, shown, measure)


def _ends(columns: Columns, line: Mapping[str, Any], scope: str, measure: str) -> Series:
    """Return `low` and `high` of a line that has a band."""
    if "deviation" in line:
        pairs = [*zip(columns.series(scope, measure), columns.series(scope, line["deviation"]), strict=True)]
        return {
            end: [None if mean is None or std is None else mean + sign * std for mean, std in pairs]
            for end, sign in (("low", -1.0), ("high", 1.0))
        }
    ends = (("low", "min"), ("high", "max")) if "low_high" in line else ()
    return {end: columns.series(scope, measure.removesuffix("mean") + name) for end, name in ends}


def _matches(columns: Columns, pattern: str, without: str | None = None) -> list[tuple[str, str]]:
    """Return the measures that a pattern is for, stages in their order, each with what its `*` stands for."""
    begin, star, end = pattern.partition("*")
    if not star:
        return [(pattern, "")]
    texts = [
        name[len(begin) : len(name) - len(end)]
        for name in sorted({measure for _, measure in columns.values})
        if name.startswith(begin) and name.endswith(end) and len(name) > len(begin) + len(end)
    ]
    texts.sort(key=lambda text: STEP_STAGES.index(text) if text in STEP_STAGES else len(STEP_STAGES))
    return [(begin + text + end, text) for text in texts if text != without]


def _held_out(evaluations: Sequence[dict[str, Any]]) -> Chart:
    """Return the averages of evaluations as points with their intervals, over the versions of policies."""
    scores: dict[str, dict[int, Any]] = {}
    for entry in evaluations:
        for score in entry["scores"]:
            name = environment_title(entry["set"], score["environment"])
            scores.setdefault(name, {})[entry["version"]] = score
    versions = sorted({version for by_version in scores.values() for version in by_version})
    series = []
    for name, by_version in sorted(scores.items()):
        line = [by_version.get(version, {"average": None}) for version in versions]
        ends = {end: [(score.get("interval") or {}).get(end) for score in line] for end in ("low", "high")}
        series.append({"name": name, "values": [score["average"] for score in line], **ends, "kind": "points"})
    chart = _chart("Held-out average", series, note="95% intervals, by policy")
    return chart | {"versions": versions, "across": "policy"}


def _chart(title: str, series: Iterable[Series], zero: bool = False, unit: str = "", note: str = "") -> Chart:
    known = [one for one in series if last_value(one["values"]) is not None]
    return {"title": title, "note": note, "zero": zero, "unit": unit, "series": known}


def last_value(values: Sequence[float | None]) -> float | None:
    """Return the last value that is known; None where none is."""
    return next((value for value in reversed(values) if value is not None), None)


def smooth(values: Sequence[float | None], steps: int) -> list[float | None]:
    """Return the mean of each value and those known among the `steps` - 1 before it; what is unknown stays so."""
    value = pl.Series("value", values, pl.Float64)
    finite = pl.when(pl.col("value").is_finite()).then("value")
    mean = finite.rolling_mean(steps, min_samples=1)
    return value.to_frame().select(pl.when(finite.is_null()).then("value").otherwise(mean))["value"].to_list()


def positions(steps: Sequence[StepNumbers], axis: str) -> list[float]:
    """Return where the end of each step lies on an axis; of work that was taken over, its time in the other run."""
    if axis == "step":
        return [float(entry.step) for entry in steps]
    if axis == "tokens":
        return [*accumulate(entry.value("rollout/output_tokens", ALL) or 0.0 for entry in steps)]
    stages = [[value for (_, name), value in e.values.items() if name.startswith("timing/stage/")] for e in steps]
    return [seconds / 60 for seconds in accumulate(map(sum, stages))]


def together(sections_of_runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return sections whose charts show one figure of several runs each: a line for each run that has it.

    Each series has the `steps` of its run, and the first run's come first: what it has not is `by_step` of nobody. A
    heat map is left out.
    """
    sections: dict[str, dict[str, Chart]] = {}
    for place, (run, own) in enumerate(sections_of_runs.items()):
        drawn = [(part["title"], chart) for part in own for chart in part["charts"] if not chart.get("cells")]
        for title, chart in drawn:
            first = {**chart, "series": [], "exit": None, "by_step": not place and chart.get("by_step")}
            for series in chart["series"]:
                name = f"{chart['title']}: {series['name']}" if len(chart["series"]) > 1 else chart["title"]
                kind = None if series.get("kind") == "bars" else series.get("kind")
                line = {**series, "name": run, "kind": kind, "place": place, "steps": chart["steps"]}
                charts = sections.setdefault(title, {})
                charts.setdefault(name, {**first, "title": name, "series": []})["series"].append(line)
    return [{"title": title, "charts": list(charts.values())} for title, charts in sections.items()]


BINS = 20
"""Stretches of equal length between the lowest and the highest reward of the run."""


def spread_charts(reader: StoreReader, run: str, steps: Sequence[int]) -> list[Chart]:
    """Return the spread of rewards as `cells`, counts of rollouts by step, and the share of identical replies by step.

    They read every rollout of the run. Raises NotThere.
    """
    rows = run_rollouts(reader, run, {"run", "for_training", "step", "environment", "example_id", "reward", "reply"})
    return [chart for chart in (_spread(rows, steps), identical_replies(rows, steps)) if chart["series"]]


def _spread(rows: pl.DataFrame, steps: Sequence[int]) -> Chart:
    found = select_from(rows, "select step, bin, num_traces, low, high from reward_distribution")
    cells = {step: [0] * BINS for step in steps}
    for step, bin, count, *_ in found.filter(pl.col("step").is_in(list(steps))).iter_rows():
        cells[step][bin] = count
    series = {"name": "scored rollouts", "values": [float(sum(row)) or None for row in cells.values()]}
    chart = _chart("Spread of rewards", [series], unit="rollouts", note="darker: a larger share of the step's rollouts")
    return chart | {"cells": [*cells.values()], "range": [found["low"].min(), found["high"].max()]}


def identical_replies(rows: pl.DataFrame, steps: Sequence[int]) -> Chart:
    """Return the share of identical replies by step, as view `identical_replies` has it."""
    by_step = dict(select_from(rows, "select step, share from identical_replies").iter_rows())
    series = {"name": "identical", "values": [by_step.get(step) for step in steps]}
    note = "share of replies that another to the same example says too"
    return _chart("Identical replies", [series], zero=True, unit="share", note=note)
