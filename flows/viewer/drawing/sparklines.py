"""Sparklines: a series by step in the height of a line of text."""

import math
from collections.abc import Sequence
from functools import lru_cache

from markupsafe import Markup

from flows.viewer.drawing.scales import Scale, around, thinned
from flows.viewer.drawing.svg import drawing, short, tag

WIDTH, HEIGHT, MARGIN = 132.0, 28.0, 3.0
MOST = 120


def sparkline(values: Sequence[float | None], title: str) -> Markup:
    """Return a small line of values, with gaps where there are none and a dot at the last; nothing without values."""
    return _drawn_once(tuple(values), title)


@lru_cache(maxsize=1024)
def _drawn_once(values: tuple[float | None, ...], title: str) -> Markup:
    places = [place for place in thinned([list(values)], MOST) if _drawn(values[place])]
    if not places:
        return Markup("")
    known = [(place, values[place] or 0.0) for place in places]
    x = Scale(0, max(1, len(values) - 1), MARGIN, WIDTH - MARGIN)
    y = Scale(*around([value for _, value in known]), HEIGHT - MARGIN, MARGIN)
    steps = ""
    for number, (place, value) in enumerate(known):
        gap = number == 0 or any(not _drawn(values[each]) for each in range(known[number - 1][0] + 1, place))
        steps += f"{'M' if gap else 'L'}{short(x.at(place))} {short(y.at(value))}"
    last, value = known[-1]
    dot = tag("circle", cx=x.at(last), cy=y.at(value), r="2.2", class_="dot")
    body = tag("g", tag("path", d=steps, class_="line"), dot, class_="s0")
    return drawing(WIDTH, HEIGHT, [body], class_="spark", role="img", aria_label=title)


def _drawn(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
