"""The curve: values by step as SVG, alone as a small picture, or as the inside of a chart of the viewer.

A picture stands alone in a page of Prefect or a document: a few kilobytes, readable on light and dark pages, no script
and no outside font. In a chart the style sheets of the viewer say what the same classes look like.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.reporting.svg import NUM_COLOURS, Scale, colour, is_drawn, label, short, svg_document, tag, text, thin

WIDTH, HEIGHT = 720.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 16.0, 34.0, 40.0
FEW = 40
"""Steps up to which every point of a line is marked by a dot."""
MOST_POINTS = 200
"""Points of a line in a picture that stands alone."""
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
STYLE = (
    "text{font:12px sans-serif;fill:#333}.title{font-size:14px}.page{fill:#fff}.grid path{stroke:#ddd;fill:none}"
    ".line{fill:none;stroke:currentColor;stroke-width:2}.band{fill:currentColor;opacity:.15}.dot{fill:currentColor}"
    + "".join(f".s{number}{{color:{COLOURS[number]}}}" for number in range(NUM_COLOURS))
    + "@media(prefers-color-scheme:dark){text{fill:#ddd}.page{fill:#1c1c22}.grid path{stroke:#444}.s0{color:#6cb4ee}}"
)
Steps = Sequence[Mapping[str, Any]]
"""By step: `step`, `finished`, perhaps `address`."""
Places = Sequence[tuple[float, float | None, int]]
"""Across, value (None for a gap) and the number of the step."""


@dataclass(frozen=True)
class Point:
    """A step's mean and its spread (0 for none)."""

    step: float
    mean: float
    spread: float = 0.0


def curve_svg(points: Sequence[Point], title: str, label: str = "reward") -> str:
    """Return the curve with a band of one spread around it; points that are not finite are left out."""
    shown = _finite(points)
    end = f"{label} {shown[-1].mean:.3f} at step {shown[-1].step:g}" if shown else ""
    return _picture([shown] if shown else [], title, text(WIDTH - RIGHT, 20, end, text_anchor="end"))


def curves_svg(series: Mapping[str, Sequence[Point]], title: str) -> str:
    """Return several curves by name, distinguished by colour and legend; those without a point are left out."""
    shown = {name: found for name, points in series.items() if (found := _finite(points))}
    legend = []
    for place, (name, points) in enumerate(shown.items()):
        y = HEIGHT - BOTTOM - 12 - 16 * (len(shown) - 1 - place)
        sign = tag("path", d=f"M{short(WIDTH - 190)} {short(y - 4)}h20", class_="line")
        named = text(WIDTH - 164, y, f"{name} {points[-1].mean:.3f}")
        legend.append(tag("g", sign, named, class_=colour(place)))
    return _picture([[Point(each.step, each.mean) for each in own] for own in shown.values()], title, *legend)


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point.mean) and math.isfinite(point.spread)]


def _picture(curves: Sequence[Sequence[Point]], title: str, *beside: str) -> str:
    """Return the curves over axes that hold 0 and 1; `beside` is what is said of them."""
    points = [point for own in curves for point in own]
    body: list[str] = [text(WIDTH / 2, HEIGHT / 2, "no scored step yet", text_anchor="middle")]
    if points:
        first, last = min(point.step for point in points), max(point.step for point in points)
        # Most rewards lie between 0 and 1: with both in view two curves can be compared at a glance.
        low = min(0.0, *(point.mean - point.spread for point in points))
        high = max(1.0, *(point.mean + point.spread for point in points))
        # One step alone still needs a width.
        x = Scale(first, max(first + 1, last), LEFT, WIDTH - RIGHT)
        y = Scale(low, high, HEIGHT - BOTTOM, TOP)
        body = [grid(x, y), *(_curve(number, own, x, y) for number, own in enumerate(curves)), *beside]
    page = tag("rect", width="100%", height="100%", class_="page")
    parts = (tag("style", STYLE), page, text(LEFT, 20, title, class_="title"), *body)
    return str(svg_document(WIDTH, HEIGHT, parts, xmlns="http://www.w3.org/2000/svg", width=WIDTH, height=HEIGHT))


def _curve(number: int, points: Sequence[Point], x: Scale, y: Scale) -> str:
    values: dict[str, Any] = {"values": [each.mean for each in points]}
    if any(each.spread for each in points):
        values["low"] = [each.mean - each.spread for each in points]
        values["high"] = [each.mean + each.spread for each in points]
    steps = [{"step": each.step, "finished": True} for each in points]
    return series_svg(number, values, steps, thin([values["values"]], MOST_POINTS), x, y)


def grid(x: Scale, y: Scale, across: str = "step") -> str:
    """Return lines at round values with their numbers, and whole numbers below; `across` is what is counted there."""
    lines = [tag("path", d=f"M{short(x.begin)} {short(y.at(each))}H{short(x.end)}") for each in y.ticks()]
    left = [text(x.begin - 6, y.at(each) + 3.5, label(each), text_anchor="end") for each in y.ticks()]
    whole = [each for each in x.ticks(8) if across not in ("step", "policy") or each == int(each)]
    foot = y.begin + 18
    below = [
        text(x.at(each), foot, f"{each:g}" if across in ("step", "policy") else label(each), text_anchor="middle")
        for each in whole
    ]
    named = text(x.begin - 6, foot, across, text_anchor="end")
    return tag("g", *lines, class_="grid") + tag("g", *left, named, *below, class_="ticks")


def series_svg(
    number: int, each: Mapping[str, Any], steps: Steps, places: Sequence[int], x: Scale, y: Scale, beside: float = 0.0
) -> str:
    """Return one series, its `values` at the places of the steps that are drawn, with a band or intervals.

    Points stand `beside` their step, so that their intervals do not cover each other.
    """
    beside = beside if each.get("kind") == "points" else 0.0
    points = [
        (x.at(steps[place].get("x", steps[place]["step"])) + beside, each["values"][place], place) for place in places
    ]
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


def _stretches(points: Places) -> list[list[tuple[float, float, int]]]:
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


def _band(each: Mapping[str, Any], points: Places, y: Scale) -> str:
    """Return the area between `low` and `high`, in stretches where both are known."""
    known = [
        (at, each["high"][place] if is_drawn(each["low"][place]) and is_drawn(each["high"][place]) else None, place)
        for at, _, place in points
    ]
    area = ""
    for own in _stretches(known):
        upper = [f"{short(at)} {short(y.at(high))}" for at, high, _ in own]
        lower = [f"{short(at)} {short(y.at(each['low'][place]))}" for at, _, place in reversed(own)]
        area += f"M{'L'.join(upper + lower)}Z" if len(own) > 1 else ""
    return tag("path", d=area, class_="band") if area else ""


def _intervals(each: Mapping[str, Any], points: Places, y: Scale) -> list[str]:
    found = []
    for at, _, place in points:
        low, high = each["low"][place], each["high"][place]
        if is_drawn(low) and is_drawn(high):
            ends = f"M{short(at)} {short(y.at(low))}V{short(y.at(high))}m-3 0h6M{short(at - 3)} {short(y.at(low))}h6"
            found.append(tag("path", d=ends, class_="interval"))
    return found


def _dot(at: float, value: float, step: Mapping[str, Any], y: Scale) -> str:
    return tag("circle", cx=at, cy=y.at(value), r="2.5", class_="dot" if step["finished"] else "dot unfinished")


def _odd(at: float, value: float, y: Scale) -> str:
    """Return a cross for what no scale has a place for: at the top, or at the bottom for minus infinity."""
    place = y.begin if value == -math.inf else y.end
    return tag("path", d=f"M{short(at - 3)} {short(place - 3)}l6 6m0 -6l-6 6", class_="odd")
