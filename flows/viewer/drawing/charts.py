"""Charts by step: lines with bands, points with intervals, stacked bars; each step is a link.

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

from flows.viewer.drawing.scales import Scale, around, label, thinned
from flows.viewer.drawing.svg import colour, drawing, link, quoted, short, tag, text
from flows.viewer.texts import visible

WIDTH, HEIGHT = 440.0, 172.0
WIDE = 900.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 10.0, 24.0
BESIDE = 5.0
FEW = 40
"""Steps up to which every point of a line is marked by a dot."""
Chart = Mapping[str, Any]
Steps = Sequence[Mapping[str, Any]]
"""By step: `step`, `address` (None for no link), `finished`."""


def chart(drawn: Chart, steps: Steps) -> Markup:
    """Return a chart over steps; what was drawn lately is not drawn again: most charts are looked at more than once."""
    return _drawn_once(json.dumps((drawn, steps)))


@lru_cache(maxsize=256)
def _drawn_once(told: str) -> Markup:
    return _picture(*json.loads(told))


def _picture(drawn: Chart, steps: Steps) -> Markup:
    series = drawn["series"]
    places = thinned([each["values"] for each in series])
    width, height = WIDE if drawn.get("wide") else (WIDTH, HEIGHT)
    x, y = _across(steps, width), _up(drawn, height)
    parts = [_grid(x, y, drawn.get("across", "step"))]
    if series and series[0].get("kind") == "bars":
        parts.append(_bars(series, steps, places, x, y))
    else:
        middle = (len(series) - 1) / 2
        parts += [_series(n, each, steps, places, x, y, BESIDE * (n - middle)) for n, each in enumerate(series)]
    parts += [_hits(steps, places, x, y), tag("g", class_="cursor")]
    return drawing(
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


def _grid(x: Scale, y: Scale, across: str) -> str:
    lines = [tag("path", d=f"M{short(x.begin)} {short(y.at(each))}H{short(x.end)}") for each in y.ticks()]
    left = [text(LEFT - 6, y.at(each) + 3.5, label(each), text_anchor="end") for each in y.ticks()]
    whole = [each for each in x.ticks(8) if each == int(each)]
    foot = y.begin + BOTTOM - 6
    below = [text(x.at(each), foot, f"{each:g}", text_anchor="middle") for each in whole]
    named = text(LEFT - 6, foot, across, text_anchor="end")
    return tag("g", *lines, class_="grid") + tag("g", *left, named, *below, class_="ticks")


def _series(
    number: int,
    each: Mapping[str, Any],
    steps: Steps,
    places: Sequence[int],
    x: Scale,
    y: Scale,
    beside: float,
) -> str:
    """Return one series; points stand `beside` their step, so that their intervals do not cover each other."""
    beside = beside if each.get("kind") == "points" else 0.0
    points = [(x.at(steps[place]["step"]) + beside, each["values"][place], place) for place in places]
    parts = []
    if each.get("low") and each.get("kind") == "points":
        parts += _intervals(each, points, y)
    elif each.get("low"):
        parts.append(_band(each, points, y))
    stretches = _stretches(points)
    if each.get("kind") != "points":
        line = "".join(_line(own, y) for own in stretches)
        parts.append(tag("path", d=line, class_="line") if line else "")
    every = each.get("kind") == "points" or len(places) <= FEW
    dots = [own for own in stretches if every or len(own) == 1]
    parts += [_dot(at, value, steps[place], y) for own in dots for at, value, place in own]
    parts += [_odd(at, value, y) for at, value, _ in points if value is not None and not math.isfinite(value)]
    return tag("g", *parts, class_=each.get("colour") or colour(number))


Points = Sequence[tuple[float, float | None, int]]


def _stretches(points: Points) -> list[list[tuple[float, float, int]]]:
    """Return points in stretches without a gap; a value that is missing or not finite is one."""
    found: list[list[tuple[float, float, int]]] = [[]]
    for at, value, place in points:
        if value is not None and math.isfinite(value):
            found[-1].append((at, value, place))
        elif found[-1]:
            found.append([])
    return [own for own in found if own]


def _line(own: Sequence[tuple[float, float, int]], y: Scale) -> str:
    if len(own) == 1:
        return ""
    return "M" + "L".join(f"{short(at)} {short(y.at(value))}" for at, value, _ in own)


def _band(each: Mapping[str, Any], points: Points, y: Scale) -> str:
    """Return the area between `low` and `high`, in stretches where both are known."""
    known = [
        (at, each["high"][place] if _drawn(each["low"][place]) and _drawn(each["high"][place]) else None, place)
        for at, _, place in points
    ]
    area = ""
    for own in _stretches(known):
        upper = [f"{short(at)} {short(y.at(high))}" for at, high, _ in own]
        lower = [f"{short(at)} {short(y.at(each['low'][place]))}" for at, _, place in reversed(own)]
        area += f"M{'L'.join(upper + lower)}Z" if len(own) > 1 else ""
    return tag("path", d=area, class_="band") if area else ""


def _intervals(each: Mapping[str, Any], points: Points, y: Scale) -> list[str]:
    found = []
    for at, _, place in points:
        low, high = each["low"][place], each["high"][place]
        if _drawn(low) and _drawn(high):
            ends = f"M{short(at)} {short(y.at(low))}V{short(y.at(high))}m-3 0h6M{short(at - 3)} {short(y.at(low))}h6"
            found.append(tag("path", d=ends, class_="interval"))
    return found


def _dot(at: float, value: float, step: Mapping[str, Any], y: Scale) -> str:
    return tag("circle", cx=at, cy=y.at(value), r="2.5", class_="dot" if step["finished"] else "dot unfinished")


def _odd(at: float, value: float, y: Scale) -> str:
    """Return a cross for what no scale has a place for: at the top, or at the bottom for minus infinity."""
    place = y.begin if value == -math.inf else y.end
    return tag("path", d=f"M{short(at - 3)} {short(place - 3)}l6 6m0 -6l-6 6", class_="odd")


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
                "values": [_told(each["values"][place]) for place in places],
                "kind": each.get("kind"),
            }
            | ({"colour": each["colour"]} if each.get("colour") else {})
            for each in drawn["series"]
        ],
    }
    return json.dumps(told, separators=(",", ":"), allow_nan=False)


def _told(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return None if value is None else float(f"{value:.5g}")
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


def _drawn(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
