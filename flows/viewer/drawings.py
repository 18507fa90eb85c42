"""Drawings of pages: a chart's figures for charts.js, which draws them by uPlot, and small pictures as plain values.

Templates lay the pictures out as SVG. Colours are names of the style sheet, which light and dark share.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flows.reporting.formats import means, number, one_line, visible
from flows.reporting.svg import NUM_COLOURS, Scale, diverging, sequential, short, thin

Chart = Mapping[str, Any]
Steps = Sequence[Mapping[str, Any]]
"""By step: `step`, perhaps `address`."""
MOST_COLUMNS = 100
"""Columns of a heat map: counts of neighbouring steps are added up beyond."""
LISTS = ("values", "low", "high", "raw")
"""What a series may have by step."""


def chart(drawn: Chart, steps: Steps) -> Markup:
    """Return a chart's box: a sentence, and the data by which charts.js draws it.

    A chart has `title` and `series`, each with `name` and `values` by step, None for a gap; perhaps with `low` and
    `high` for a band or an interval, `kind` (points, bars), and `steps` of its own. `zero` begins at zero, `across` is
    what is counted across. `cells` are the counts of a heat map between `range`, which are added up for neighbouring
    steps where there are many.
    """
    series, cells = drawn["series"], drawn.get("cells")
    every = -(-len(steps) // MOST_COLUMNS)
    several = any("steps" in one for one in series)
    places = [*range(0, len(steps), every)] if cells else [] if several else thin([one["values"] for one in series])
    data = {
        **{name: drawn.get(name, default) for name, default in (("unit", ""), ("across", "step"), ("range", None))},
        **{name: bool(drawn.get(name)) for name in ("log", "zero")},
        **_along([steps[place] for place in places]),
        "exit": next((_x(step) for step in steps if drawn.get("exit") and step["step"] == drawn["exit"]["step"]), None),
        "cells": cells and [[sum(c) for c in zip(*cells[place : place + every], strict=True)] for place in places],
        "series": [_series(n, one, places) for n, one in enumerate(series)],
    }
    box = Markup('<div class="chart {}" role="group" tabindex="0" aria-label="{}" data-chart="{}"><p>{}</p></div>')
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return box.format("wide" * bool(drawn.get("wide")), f"{drawn['title']}, by step", text, text_of(drawn, steps))


def text_of(drawn: Chart, steps: Steps) -> str:
    """Return a sentence with the first and the last value of each series."""
    descriptions = []
    for one in drawn["series"]:
        of = one.get("steps", steps)
        values = [(value, of[place]["step"]) for place, value in enumerate(one["values"]) if value is not None]
        if values:
            (first, begin), (last, end) = values[0], values[-1]
            descriptions.append(f"{one['name']}: {first:.4g} at step {begin}, {last:.4g} at step {end}")
    return "; ".join(descriptions)


def _series(position: int, one: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Return a series with its values at the places that are drawn; one with its own steps has places of its own."""
    own = thin([one["values"]]) if "steps" in one else places
    return {
        "name": visible(one["name"]),
        "kind": one.get("kind"),
        "colour": f"c{(one.get('colour') or f's{position % NUM_COLOURS}')[1:]}",
        **{name: [_json_number(one[name][place]) for place in own] for name in LISTS if one.get(name)},
        **(_along([one["steps"][place] for place in own]) if "steps" in one else {}),
    }


def _along(steps: Steps) -> dict[str, Any]:
    """Return the places and numbers of steps, and `to`, which stands before the number in their addresses."""
    address = steps[0].get("address") if steps else None
    to = address.removesuffix(str(steps[0]["step"])) if address else None
    return {"x": [_x(step) for step in steps], "steps": [step["step"] for step in steps], "to": to}


def _x(step: Mapping[str, Any]) -> float:
    return float(f"{step.get('x', step['step']):.7g}")


def _json_number(value: float | None) -> float | str | None:
    # Five digits are more than a tip shows, and keep a page of many charts small.
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.5g}")
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


SPARK_WIDTH, SPARK_HEIGHT, SPARK_MARGIN = 132.0, 28.0, 3.0
MAX_SPARK_POINTS = 50


def sparkline(values: Sequence[float | None], title: str) -> Markup:
    """Return a small line of values, with gaps where there are none and a dot at the last; nothing without values."""
    values = means(values, MAX_SPARK_POINTS)
    known = [value for value in values if value is not None]
    if not known:
        return Markup("")
    x = Scale(0, max(1, len(values) - 1), SPARK_MARGIN, SPARK_WIDTH - SPARK_MARGIN)
    low, high = min(known), max(known)
    y = Scale(low, high if high > low else low + 1, SPARK_HEIGHT - SPARK_MARGIN, SPARK_MARGIN)
    points = {at: f"{short(x.at(at))} {short(y.at(value))}" for at, value in enumerate(values) if value is not None}
    path = "".join(f"{'L' if at - 1 in points else 'M'}{point}" for at, point in points.items())
    last = Markup('<path class="dot" d="M{}h0"/>').format(points[max(points)])
    svg = '<svg class="spark s0" viewBox="0 0 {} {}" role="img" aria-label="{}"><path class="line" d="{}"/>{}</svg>'
    return Markup(svg).format(short(SPARK_WIDTH), short(SPARK_HEIGHT), title, path, last)


def cell_class(by: int) -> str:
    """Return the class of what a run computed, by its number in the ledger's runs: own work is the first."""
    return "s0" if by == 0 else f"s{1 + (by - 1) % (NUM_COLOURS - 1)}"


def segment(sample: Mapping[str, Any], longest: int, largest: float | None, rewards: Sequence[Any]) -> dict[str, Any]:
    """Return a sample of a packed row as it is drawn: `x` and `width` in per cent, class and title.

    `longest` are the tokens that fill the width, `largest` the size of the batch's largest advantage, `rewards` its
    lowest and highest reward: what the colours are measured by.
    """
    shades = f"adv-{diverging(sample['advantage'], largest)} rew-{sequential(sample['reward'], *rewards)}"
    numbers = [f"{name} {number(sample[name], 4)}" for name in ("advantage", "reward", "baseline")]
    where = f"{sample['environment']} / {sample['example_id']}" if sample["environment"] else "its trace is not there"
    lines = [sample["sample_id"], where, *numbers, f"{sample['num_tokens']} tokens, from {sample['start']} on"]
    return {
        **{"x": 100 * sample["start"] / longest, "width": 100 * sample["num_tokens"] / longest},
        "class": f"seg {shades} own-{sample['place'] % NUM_COLOURS}",
        "title": "\n".join(one_line(line, 120) for line in lines),
    }
