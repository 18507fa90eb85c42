"""The charts of a run's page, as its address asks for them: of which runs, over what, which steps, which first."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flows.queries.charts import charts, last_value
from flows.queries.curves import AXES, is_flat_zero, positions, smooth, together
from flows.queries.metrics import StepNumbers, numbers
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.scores import held_out
from flows.queries.spread import spread_charts
from flows.queries.store_reader import StoreReader
from flows.reporting.svg import colour
from flows.reporting.usual_range import FIGURES, band_exit
from flows.viewer import addresses
from tasks.stages import BY_NAME, OTHER_COLOUR

Row = dict[str, Any]
Measured = tuple[Sequence[StepNumbers], list[Row]]
"""The steps of a run, and its evaluations."""
SMOOTHED = ("5", "20", "50")
MOST_RUNS = 8
"""Runs in one chart: there are as many colours."""
UNITS = {"step": "step", "tokens": "tokens", "time": "min"}
BANDS = (*FIGURES, "Identical replies")
"""Charts of which the first figure is said to leave its band."""


def step_place(run: str, each: StepNumbers) -> Row:
    """Return a step as charts and tables take it."""
    return {"step": each.step, "address": addresses.step(run, each.step), "finished": each.work.finished}


def curves(library: StoreReader, run: str, own: Measured, asked: PageRequest) -> Row:
    """Return `sections` of charts, `zeros` that are not drawn, `hidden` ones, and `curves`, what was asked for.

    Asks: `with` (more runs, by commas), `x`, `smooth`, `log`, `from`, `to`, `front` and `hide` (names of charts, by
    commas), `spread` (what needs every rollout read). Raises NotThere for an unknown run, BadQuestion.
    """
    runs = [run, *(each for each in _names(asked, "with") if each != run)]
    if len(runs) > MOST_RUNS:
        raise BadQuestion(f"with={asked.text('with')[:80]!r}: at most {MOST_RUNS} runs stand in one chart")
    of_runs = {run: _sections(library, run, own, asked)}
    of_runs |= {
        each: _sections(library, each, (numbers(library, each), held_out(library, each)), asked) for each in runs[1:]
    }
    found = of_runs[run] if len(runs) == 1 else together(of_runs)
    every = [chart | {"name": _slug(chart["title"])} for section in found for chart in section["charts"]]
    zeros = {chart["name"] for chart in every if is_flat_zero(chart)}
    front, hidden = _names(asked, "front"), _names(asked, "hide")
    apart = {*front, *hidden, *zeros}
    by_name = {chart["name"]: _cut_and_smooth(chart, asked) for chart in every}
    first = [by_name[each] for each in front if each in by_name]
    rest = [
        {
            "title": each["title"],
            "charts": [by_name[name] for c in each["charts"] if (name := _slug(c["title"])) not in apart],
        }
        for each in found
    ]
    return {
        "sections": [{"title": "In front", "charts": first}, *rest],
        "zeros": [{"name": each["name"], "title": each["title"]} for each in every if each["name"] in zeros - {*front}],
        "hidden": [
            {"name": each["name"], "title": each["title"]} for each in every if each["name"] in {*hidden} - zeros
        ],
        "exits": sorted(
            ({"name": each["name"], "title": each["title"], **each["exit"]} for each in every if each["exit"]),
            key=lambda each: each["step"],
        ),
        "curves": {
            **{
                name: asked.text(name)
                for name in ("with", "x", "smooth", "log", "from", "to", "front", "hide", "spread")
            },
            "axes": AXES,
            "smoothed": SMOOTHED,
            "runs": [{"run": each, "colour": colour(number)} for number, each in enumerate(runs)],
            "known": [each for each in library.store.runs.names()[::-1] if each not in runs],
            "most": MOST_RUNS,
        },
    }


def _names(asked: PageRequest, name: str) -> list[str]:
    return list(dict.fromkeys(each for each in asked.text(name).split(",") if each))


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _sections(library: StoreReader, run: str, of_run: Measured, asked: PageRequest) -> list[Row]:
    """Return the sections of one run, whose charts know over what they are drawn."""
    measured, evaluations = of_run
    axis = asked.one_of("x", AXES, "step")
    ends = positions(measured, axis)
    steps = [{**step_place(run, each), "x": end} for each, end in zip(measured, ends, strict=True)]
    # A policy stands where the steps end that it was trained in.
    at = {0: 0.0} | {each.step + 1: end for each, end in zip(measured, ends, strict=True)} if axis != "step" else {}
    known = library.cached_while(("charts", run), library.mark, lambda: charts(measured, evaluations))
    found = [{**each, "charts": [{**chart} for chart in each["charts"]]} for each in known]
    if asked.flag("spread"):
        found[:0] = [{"title": "Replies", "charts": spread_charts(library, run, [each.step for each in measured])}]
    for chart in (each for section in found for each in section["charts"]):
        chart["by_step"], versions = "versions" not in chart, chart.get("versions", ())
        chart["steps"] = (
            steps
            if chart["by_step"]
            else [
                {
                    "step": each,
                    "x": at.get(each, float(each)),
                    "address": None if chart.get("of_steps") else addresses.evaluation(run, each),
                    "finished": True,
                }
                for each in versions
            ]
        )
        first = chart["series"][0]
        by = [each["step"] for each in chart["steps"]]
        chart["exit"] = band_exit(first["values"], by) if chart["title"] in BANDS else None
        chart["axis"] = UNITS[axis] if axis != "step" else chart.get("across", "step")
        chart["series"] = [{**each, "colour": _colour(n, each)} for n, each in enumerate(chart["series"])]
    return found


def _cut_and_smooth(chart: Mapping[str, Any], asked: PageRequest) -> Row:
    """Return a chart zoomed and smoothed; `raw` of a series is what it was."""
    first, last = asked.number("from", 0), asked.number("to", 2**31)
    steps = asked.number("smooth", 1, least=1, most=1000)

    def cut(values: Sequence[Any], of: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [value for value, step in zip(values, of, strict=True) if first <= step["step"] <= last]

    series = []
    for each in chart["series"]:
        of = each.get("steps", chart["steps"])
        lists: Row = {name: cut(each[name], of) for name in ("values", "low", "high") if each.get(name)}
        if steps > 1 and not each.get("kind") and not chart.get("over"):
            lists |= {"raw": lists["values"], "values": smooth(lists["values"], steps), "low": None, "high": None}
        own = {"steps": cut(of, of), "colour": colour(each["place"])} if "steps" in each else {}
        series.append({**each, **own, **lists, "last": last_value(lists["values"])})
    over = {name: cut(chart[name], chart["steps"]) for name in ("over", "cells") if chart.get(name)}
    over |= {} if chart.get("over") else {"across": chart["axis"]}
    log = asked.flag("log") and not any(each.get("kind") == "bars" for each in series)
    return {**chart, **over, "series": series, "steps": cut(chart["steps"], chart["steps"]), "log": log}


def _colour(number: int, series: Mapping[str, Any]) -> str:
    """Return the class of a series: bars without a place of their own are stages."""
    if series.get("kind") == "bars" and "place" not in series:
        return colour(stage_number(series["name"]))
    return colour(series.get("place", number))


def stage_number(stage: str) -> int:
    """Return the number of a stage's colour."""
    return BY_NAME[stage].colour if stage in BY_NAME else OTHER_COLOUR
