"""curve_svg, curves_svg: learning curves as SVG that stands alone, for artifacts in Prefect and pages in Markdown."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flows.reporting.formats import visible
from flows.reporting.svg import Scale, label, short, thin

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 40
FEW = 40
"""Steps up to which every point of a line is marked by a dot."""
MAX_POINTS = 200


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
    return _picture({"": shown}, title, end)


def curves_svg(series: Mapping[str, Sequence[Point]], title: str) -> str:
    """Return several curves by name, distinguished by colour and legend; those without a point are left out."""
    finite = {name: _finite(points) for name, points in series.items()}
    named = {f"{name} {points[-1].mean:.3f}": points for name, points in finite.items() if points}
    return _picture(
        {name: [Point(point.step, point.mean) for point in points] for name, points in named.items()}, title
    )


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point.mean) and math.isfinite(point.spread)]


def _picture(curves: Mapping[str, Sequence[Point]], title: str, end: str = "") -> str:
    """Return curves by name over axes that hold 0 and 1; without a name a curve has no legend."""
    points = [point for curve in curves.values() for point in curve]
    first, last = (pick((point.step for point in points), default=0) for pick in (min, max))
    # Most rewards lie between 0 and 1: with both in view two curves can be compared at a glance.
    low = min([0.0, *(point.mean - point.spread for point in points)])
    high = max([1.0, *(point.mean + point.spread for point in points)])
    # One step alone still needs a width.
    x, y = Scale(first, max(first + 1, last), LEFT, WIDTH - RIGHT), Scale(low, high, HEIGHT - BOTTOM, TOP)
    svg: str = _template().render(
        **{"title": title, "end": end, "width": WIDTH, "height": HEIGHT},
        **{"left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT - BOTTOM},
        rows=[(y.at(tick), label(tick)) for tick in y.ticks()],
        columns=[(x.at(tick), f"{tick:g}") for tick in x.ticks(8) if tick == int(tick)],
        curves=[_curve(name, curve, x, y) for name, curve in curves.items() if curve],
    )
    return svg


def _curve(name: str, points: Sequence[Point], x: Scale, y: Scale) -> dict[str, Any]:
    drawn = [points[place] for place in thin([[point.mean for point in points]], MAX_POINTS)]

    def places(offset: float) -> list[str]:
        return [f"{short(x.at(point.step))} {short(y.at(point.mean + offset * point.spread))}" for point in drawn]

    band = places(1) + places(-1)[::-1] if any(point.spread for point in drawn) else []
    return {"name": name, "line": places(0), "band": band, "dots": places(0) if len(drawn) <= FEW else []}


@cache
def _template() -> Any:
    from jinja2 import Environment  # Prefect and the viewer load it; most commands draw no curve

    def text(value: object) -> object:
        return visible(value) if isinstance(value, str) else short(value) if isinstance(value, float) else value

    # Autoescape: names of runs may hold anything.
    environment = Environment(autoescape=True, finalize=text, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(Path(__file__).with_name("curve.svg").read_text(encoding="utf-8"))
