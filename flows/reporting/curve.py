"""curve_svg: a learning curve as SVG that stands alone, for artifacts in Prefect."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flows.reporting.formats import visible
from flows.reporting.svg import Scale, short, thin, ticks

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 40
FEW = 40
"""Steps up to which every point of a line is marked by a dot."""
MAX_POINTS = 200


class Point(NamedTuple):
    """A step's mean and its spread (0 for none)."""

    step: float
    mean: float
    spread: float = 0.0


def curve_svg(points: Sequence[Point], title: str, label: str = "reward") -> str:
    """Return a curve over axes that hold 0 and 1, with a band of one spread around it and its last value in words.

    Points that are not finite are left out.
    """
    finite = [point for point in points if all(map(math.isfinite, point))]
    drawn = [finite[place] for place in thin([[point.mean for point in finite]], MAX_POINTS)]
    # Most rewards lie between 0 and 1: with both in view two curves can be compared at a glance.
    low = min([0.0, *(point.mean - point.spread for point in finite)])
    high = max([1.0, *(point.mean + point.spread for point in finite)])
    first, last = (finite[0].step, finite[-1].step) if finite else (0, 0)
    # One step alone still needs a width.
    x, y = Scale(first, max(first + 1, last), LEFT, WIDTH - RIGHT), Scale(low, high, HEIGHT - BOTTOM, TOP)

    def places(offset: float) -> list[str]:
        return [f"{short(x.at(point.step))} {short(y.at(point.mean + offset * point.spread))}" for point in drawn]

    svg: str = _template().render(
        **{"title": title, "width": WIDTH, "height": HEIGHT},
        **{"left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT - BOTTOM},
        end=f"{label} {drawn[-1].mean:.3f} at step {drawn[-1].step:g}" if drawn else "",
        rows=[(y.at(tick), f"{tick:g}") for tick in ticks(low, high, 6)],
        columns=[(x.at(tick), f"{tick:g}") for tick in ticks(x.low, x.high, 8) if tick == int(tick)],
        line=places(0),
        band=places(1) + places(-1)[::-1] if any(point.spread for point in drawn) else [],
        dots=places(0) if len(drawn) <= FEW else [],
    )
    return svg


@cache
def _template() -> Any:
    from jinja2 import Environment  # Prefect and the viewer load it; most commands draw no curve

    def text(value: object) -> object:
        return visible(value) if isinstance(value, str) else short(value) if isinstance(value, float) else value

    # Autoescape: names of runs may hold anything.
    environment = Environment(autoescape=True, finalize=text, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(Path(__file__).with_name("curve.svg").read_text(encoding="utf-8"))
