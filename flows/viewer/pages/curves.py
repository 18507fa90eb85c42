"""The charts of a run's page, as its address asks for them: of which runs, over what, which steps."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flows.queries.charts import AXES, charts, last_value, positions, smooth, spread_charts, together
from flows.queries.metrics import StepNumbers, numbers
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.run_state import recorded_warnings
from flows.queries.scores import held_out
from flows.queries.store_reader import StoreReader
from flows.reporting.svg import colour
from flows.viewer import addresses
from tasks.metrics.warnings import RULES
from tasks.stages import BY_NAME

Row = dict[str, Any]
Measured = tuple[Sequence[StepNumbers], list[Row]]
"""The steps of a run, and its evaluations."""
SMOOTHED = ("5", "20", "50")
MOST_RUNS = 8
"""Runs in one chart: there are as many colours."""
UNITS = {"step": "step", "tokens": "tokens", "time": "min"}
WARNED = {rule.name: rule.figure.replace("/all", "") for rule in RULES}
"""The measure of each rule, whose chart marks the first step of its warning."""
ASKED = ("with", "x", "smooth", "log", "from", "to", "spread")
"""The parameters of an address that the page repeats."""


def step_place(run: str, each: StepNumbers) -> Row:
    """Return a step as charts and tables take it."""
    return {"step": each.step, "address": addresses.step(run, each.step), "finished": each.work.finished}


def curves(reader: StoreReader, run: str, own: Measured, request: PageRequest) -> Row:
    """Return `sections` of charts, titles of charts that are `zeros` and not drawn, and `curves`, the request.

    Asks: `with` (more runs, by commas), `x`, `smooth`, `log`, `from`, `to`, `spread` (what needs every rollout read).
    Raises NotThere for an unknown run, BadQuestion.
    """
    runs = list(dict.fromkeys((run, *filter(None, request.text("with").split(",")))))
    if len(runs) > MOST_RUNS:
        raise BadQuestion(f"with={request.text('with')[:80]!r}: at most {MOST_RUNS} runs stand in one chart")
    measured = {name: (numbers(reader, name), held_out(reader, name)) for name in runs[1:]}
    of_runs = {name: _sections(reader, name, of_run, request) for name, of_run in ({run: own} | measured).items()}
    sections = of_runs[run] if len(runs) == 1 else together(of_runs)
    drawn, zeros = [], []
    for section in sections:
        # Of all steps: what is zero between two of them alone is drawn.
        zeros += [chart["title"] for chart in section["charts"] if _is_zero(chart)]
        shown = [_zoom_and_smooth(chart, request) for chart in section["charts"] if not _is_zero(chart)]
        drawn.append({"title": section["title"], "charts": shown})
    return {
        "sections": drawn,
        "zeros": zeros,
        "curves": {
            **{name: request.text(name) for name in ASKED},
            "axes": AXES,
            "smoothed": SMOOTHED,
            "runs": [{"run": name, "colour": colour(number)} for number, name in enumerate(runs)],
            "known": [name for name in reader.store.runs.names()[::-1] if name not in runs],
            "most": MOST_RUNS,
        },
    }


def _is_zero(chart: Mapping[str, Any]) -> bool:
    return not any(any(one["values"]) for one in chart["series"])


def _sections(reader: StoreReader, run: str, of_run: Measured, request: PageRequest) -> list[Row]:
    """Return the sections of one run, whose charts have the steps that they are drawn over."""
    measured, evaluations = of_run
    axis = request.one_of("x", AXES, "step")
    ends = positions(measured, axis)
    steps = [{**step_place(run, each), "x": end} for each, end in zip(measured, ends, strict=True)]
    # A policy stands where the steps end that it was trained in.
    at = {0: 0.0} | {each.step + 1: end for each, end in zip(measured, ends, strict=True)} if axis != "step" else {}
    known = reader.cache.once(("charts", run, reader.mark), lambda: charts(measured, evaluations))
    sections = [{**section, "charts": [{**chart} for chart in section["charts"]]} for section in known]
    if request.flag("spread"):
        sections[:0] = [{"title": "Replies", "charts": spread_charts(reader, run, [each.step for each in measured])}]
    marks = {
        WARNED[hit["rule"]]: {"step": hit["step"], "description": f"step {hit['step']}: {hit['text']}"}
        for hit in reversed(recorded_warnings(reader.store.runs, run))
        if hit["rule"] in WARNED
    }
    for chart in (chart for section in sections for chart in section["charts"]):
        chart["by_step"] = "versions" not in chart
        policies = [
            {"step": version, "x": at.get(version, float(version)), "address": addresses.evaluation(run, version)}
            for version in chart.get("versions", ())
        ]
        chart["steps"] = steps if chart["by_step"] else policies
        chart["exit"] = marks.get(chart["series"][0].get("measure"))
        chart["across"] = UNITS[axis] if axis != "step" else chart.get("across", "step")
        chart["series"] = [{**one, "colour": _colour(n, one)} for n, one in enumerate(chart["series"])]
    return sections


def _zoom_and_smooth(chart: Mapping[str, Any], request: PageRequest) -> Row:
    """Return a chart between two steps, smoothed; `raw` of a series are its values before."""
    first, last = request.number("from", 0), request.number("to", 2**31)
    width = request.number("smooth", 1, least=1, most=1000)

    def within(values: Sequence[Any], steps: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [value for value, step in zip(values, steps, strict=True) if first <= step["step"] <= last]

    series = []
    for one in chart["series"]:
        steps = one.get("steps", chart["steps"])
        lists: Row = {name: within(one[name], steps) for name in ("values", "low", "high") if one.get(name)}
        if width > 1 and not one.get("kind"):
            lists |= {"raw": lists["values"], "values": smooth(lists["values"], width), "low": None, "high": None}
        own = {"steps": within(steps, steps), "colour": colour(one["place"])} if "steps" in one else {}
        series.append({**one, **own, **lists, "last": last_value(lists["values"])})
    cells = {"cells": within(chart["cells"], chart["steps"])} if chart.get("cells") else {}
    log = request.flag("log") and not any(one.get("kind") == "bars" for one in series)
    name = re.sub(r"[^a-z0-9]+", "-", chart["title"].lower()).strip("-")
    return {
        **chart,
        **cells,
        "name": name,
        "series": series,
        "steps": within(chart["steps"], chart["steps"]),
        "log": log,
    }


def _colour(number: int, series: Mapping[str, Any]) -> str:
    """Return the class of a series: a stage has its colour in all charts."""
    if series.get("kind") == "bars" and series["name"] in BY_NAME:
        return colour(BY_NAME[series["name"]].colour)
    return colour(series.get("place", number))
