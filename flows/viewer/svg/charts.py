"""Charts by step as SVG: lines with bands, points with intervals, stacked bars; and sparklines.

A chart is plain values: `title`, `series` (each `name`, `values` by step with None for a gap, perhaps `low` and `high`
for a band or an interval, perhaps `kind`: line, points or bars), `zero` to begin at zero, `wide` for one that has the
page to itself, `across` for what is counted across where it is no step. The steps that it is drawn
over are the same for all charts of a page, so that a cursor can stand at the same step in all of them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from flows.reporting.curve import Steps, grid, is_drawn, series_svg
from flows.reporting.svg import Scale, around, colour, link, quoted, short, svg_document, tag, thinned
from flows.reporting.texts import visible

WIDTH, HEIGHT = 440.0, 172.0
WIDE = 900.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 10.0, 24.0
BESIDE = 5.0
Chart = Mapping[str, Any]


def chart(drawn: Chart, steps: Steps) -> Markup:
    """Return a chart over steps; what was drawn lately is not drawn again: most charts are looked at more than once."""
    return _chart_once(json.dumps((drawn, steps)))


@lru_cache(maxsize=256)
def _chart_once(told: str) -> Markup:
    return _picture(*json.loads(told))


def _picture(drawn: Chart, steps: Steps) -> Markup:
    series = drawn["series"]
    places = thinned([each["values"] for each in series])
    width, height = WIDE if drawn.get("wide") else (WIDTH, HEIGHT)
    x, y = _across(steps, width), _up(drawn, height)
    parts = [grid(x, y, drawn.get("across", "step"))]
    if series and series[0].get("kind") == "bars":
        parts.append(_bars(series, steps, places, x, y))
    else:
        middle = (len(series) - 1) / 2
        parts += [series_svg(n, each, steps, places, x, y, BESIDE * (n - middle)) for n, each in enumerate(series)]
    parts += [_hits(steps, places, x, y), tag("g", class_="cursor")]
    return svg_document(
        width,
        height,
        (tag("desc", text_of(drawn, steps)), *parts),
        class_="chart",
        role="group",
        tabindex="0",
        aria_label=f"{drawn['title']}, by step",
        data_chart=_values(drawn, steps, places, x, y),
    )


def text_of(drawn: Chart, steps: Steps) -> str:
    """Return what a chart shows in words, escaped."""
    told = []
    for each in drawn["series"]:
        known = [(value, steps[place]["step"]) for place, value in enumerate(each["values"]) if value is not None]
        if known:
            (first, begun), (last, ended) = known[0], known[-1]
            told.append(f"{each['name']}: {first:.4g} at step {begun}, {last:.4g} at step {ended}")
    return quoted("; ".join(told))


def _across(steps: Steps, width: float) -> Scale:
    numbers = [each["step"] for each in steps] or [0]
    low, high = min(numbers), max(numbers)
    room = 0.5 if high == low else max(0.5, (high - low) * 0.01)
    return Scale(low - room, high + room, LEFT, width - RIGHT)


def _up(drawn: Chart, height: float) -> Scale:
    series = drawn["series"]
    if series and series[0].get("kind") == "bars":
        sums = [sum(value or 0.0 for value in own) for own in zip(*(each["values"] for each in series), strict=True)]
        return Scale(*around(sums, zero=True), height - BOTTOM, TOP)
    names = ("values", "low", "high")
    known = [value for each in series for name in names for value in each.get(name) or () if value is not None]
    return Scale(*around(known, drawn.get("zero", False)), height - BOTTOM, TOP)


def _bars(series: Sequence[Mapping[str, Any]], steps: Steps, places: Sequence[int], x: Scale, y: Scale) -> str:
    """Return bars of all series on top of each other, from the first up."""
    width = max(1.0, min(26.0, 0.8 * (x.end - x.begin) / max(1.0, x.high - x.low)))
    parts = []
    for number, each in enumerate(series):
        bars = []
        for place in places:
            value = each["values"][place]
            below = sum(other["values"][place] or 0.0 for other in series[:number])
            if value is not None and math.isfinite(value) and math.isfinite(below):
                top, foot = y.at(below + value), y.at(below)
                at = x.at(steps[place]["step"]) - width / 2
                bars.append(tag("rect", x=at, y=top, width=width, height=max(0.2, foot - top)))
        parts.append(tag("g", *bars, class_=f"bar {each.get('colour') or colour(number)}"))
    return "".join(parts)


def _hits(steps: Steps, places: Sequence[int], x: Scale, y: Scale) -> str:
    """Return a link for each step over its whole height; the keyboard reaches them by the chart's own keys."""
    placed = tuple((x.at(steps[place]["step"]), steps[place].get("address")) for place in places)
    return _links(placed, x.end - x.begin, f" {short(y.end)}V{short(y.begin)}")


@lru_cache(maxsize=32)
def _links(placed: tuple[tuple[float, str | None], ...], across: float, line: str) -> str:
    """Return the links at their places, drawn once for all charts over the same steps."""
    wide = min((b - a for (a, _), (b, _) in pairwise(placed)), default=across)
    links = [link(address, tag("path", d=f"M{short(at)}{line}"), tabindex="-1") for at, address in placed]
    return tag("g", *links, class_="hits", stroke_width=max(1.0, wide))


def _values(drawn: Chart, steps: Steps, places: Sequence[int], x: Scale, y: Scale) -> str:
    """Return what the cursor shows, as JSON: places across, steps, and every value."""
    told = {
        "x": [round(x.at(steps[place]["step"]), 1) for place in places],
        "steps": [steps[place]["step"] for place in places],
        "y": [y.low, y.high, y.begin, y.end],
        "unit": drawn.get("unit", ""),
        "across": drawn.get("across", "step"),
        "series": [
            {
                "name": visible(each["name"]),
                "values": [_json_number(each["values"][place]) for place in places],
                "kind": each.get("kind"),
            }
            | ({"colour": each["colour"]} if each.get("colour") else {})
            for each in drawn["series"]
        ],
    }
    return json.dumps(told, separators=(",", ":"), allow_nan=False)


def _json_number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.5g}")
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


SPARK_WIDTH, SPARK_HEIGHT, SPARK_MARGIN = 132.0, 28.0, 3.0
MOST_SPARK_POINTS = 120


def sparkline(values: Sequence[float | None], title: str) -> Markup:
    """Return a small line of values, with gaps where there are none and a dot at the last; nothing without values."""
    return _spark(tuple(values), title)


@lru_cache(maxsize=1024)
def _spark(values: tuple[float | None, ...], title: str) -> Markup:
    places = [place for place in thinned([list(values)], MOST_SPARK_POINTS) if is_drawn(values[place])]
    if not places:
        return Markup("")
    known = [(place, values[place] or 0.0) for place in places]
    x = Scale(0, max(1, len(values) - 1), SPARK_MARGIN, SPARK_WIDTH - SPARK_MARGIN)
    y = Scale(*around([value for _, value in known]), SPARK_HEIGHT - SPARK_MARGIN, SPARK_MARGIN)
    steps = ""
    for number, (place, value) in enumerate(known):
        gap = number == 0 or any(not is_drawn(values[each]) for each in range(known[number - 1][0] + 1, place))
        steps += f"{'M' if gap else 'L'}{short(x.at(place))} {short(y.at(value))}"
    last, value = known[-1]
    dot = tag("circle", cx=x.at(last), cy=y.at(value), r="2.2", class_="dot")
    body = tag("g", tag("path", d=steps, class_="line"), dot, class_="s0")
    return svg_document(SPARK_WIDTH, SPARK_HEIGHT, [body], class_="spark", role="img", aria_label=title)
