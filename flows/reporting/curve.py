"""curve_svg, curves_svg: learning curves as SVG that stands alone, for artifacts in Prefect and pages in Markdown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.reporting.svg import Scale, label, short, svg_document, tag, text, thin

WIDTH, HEIGHT = 720.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 16.0, 34.0, 40.0
FEW = 40
"""Steps up to which every point of a line is marked by a dot."""
MAX_POINTS = 200
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
STYLE = (
    "text{font:12px sans-serif;fill:#333}.title{font-size:14px}.page{fill:#fff}.grid path{stroke:#ddd;fill:none}"
    ".line{fill:none;stroke:currentColor;stroke-width:2}.band{fill:currentColor;opacity:.15}.dot{fill:currentColor}"
    + "".join(f".s{number}{{color:{colour}}}" for number, colour in enumerate(COLOURS))
    + "@media(prefers-color-scheme:dark){text{fill:#ddd}.page{fill:#1c1c22}.grid path{stroke:#444}.s0{color:#6cb4ee}}"
)


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
    shown = {name: finite for name, points in series.items() if (finite := _finite(points))}
    legend = []
    for index, (name, points) in enumerate(shown.items()):
        y = HEIGHT - BOTTOM - 12 - 16 * (len(shown) - 1 - index)
        sign = tag("path", d=f"M{short(WIDTH - 190)} {short(y - 4)}h20", class_="line")
        legend.append(tag("g", sign, text(WIDTH - 164, y, f"{name} {points[-1].mean:.3f}"), class_=_colour(index)))
    return _picture([[Point(point.step, point.mean) for point in points] for points in shown.values()], title, *legend)


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point.mean) and math.isfinite(point.spread)]


def _colour(index: int) -> str:
    return f"s{index % len(COLOURS)}"


def _picture(curves: Sequence[Sequence[Point]], title: str, *legend: str) -> str:
    """Return the curves over axes that hold 0 and 1, and a legend."""
    points = [point for curve in curves for point in curve]
    body: list[str] = [text(WIDTH / 2, HEIGHT / 2, "no scored step yet", text_anchor="middle")]
    if points:
        first, last = min(point.step for point in points), max(point.step for point in points)
        # Most rewards lie between 0 and 1: with both in view two curves can be compared at a glance.
        low = min(0.0, *(point.mean - point.spread for point in points))
        high = max(1.0, *(point.mean + point.spread for point in points))
        # One step alone still needs a width.
        x = Scale(first, max(first + 1, last), LEFT, WIDTH - RIGHT)
        y = Scale(low, high, HEIGHT - BOTTOM, TOP)
        body = [_axes(x, y), *(_curve(index, curve, x, y) for index, curve in enumerate(curves)), *legend]
    page = tag("rect", width="100%", height="100%", class_="page")
    parts = (tag("style", STYLE), page, text(LEFT, 20, title, class_="title"), *body)
    return str(svg_document(WIDTH, HEIGHT, parts, xmlns="http://www.w3.org/2000/svg", width=WIDTH, height=HEIGHT))


def _axes(x: Scale, y: Scale) -> str:
    """Return lines at round values, with their numbers, and whole steps below."""
    lines = [tag("path", d=f"M{short(x.begin)} {short(y.at(tick))}H{short(x.end)}") for tick in y.ticks()]
    values = [text(x.begin - 6, y.at(tick) + 3.5, label(tick), text_anchor="end") for tick in y.ticks()]
    whole = [tick for tick in x.ticks(8) if tick == int(tick)]
    steps = [text(x.at(tick), y.begin + 18, f"{tick:g}", text_anchor="middle") for tick in whole]
    return tag("g", *lines, class_="grid") + tag(
        "g", *values, *steps, text(LEFT - 6, y.begin + 18, "step", text_anchor="end")
    )


def _curve(index: int, points: Sequence[Point], x: Scale, y: Scale) -> str:
    drawn = [points[place] for place in thin([[point.mean for point in points]], MAX_POINTS)]

    def path(offset: float) -> list[str]:
        return [f"{short(x.at(point.step))} {short(y.at(point.mean + offset * point.spread))}" for point in drawn]

    parts = [tag("path", d=f"M{'L'.join(path(0))}", class_="line")] if len(drawn) > 1 else []
    if any(point.spread for point in drawn):
        parts.insert(0, tag("path", d=f"M{'L'.join(path(1) + path(-1)[::-1])}Z", class_="band"))
    if len(drawn) <= FEW:
        parts += [tag("circle", cx=x.at(p.step), cy=y.at(p.mean), r="2.5", class_="dot") for p in drawn]
    return tag("g", *parts, class_=_colour(index))
