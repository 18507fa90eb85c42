"""Scale, thin: places, points and steps of colour of drawings."""

import math
from collections.abc import Sequence
from typing import NamedTuple

NUM_COLOURS = 8
"""Classes `s0` to `s7` of the style sheet."""
MOST_POINTS = 220
"""Points of a line that are drawn; of more, the least and the most of each stretch are kept."""


def colour(number: int) -> str:
    """Return the class that colours the series of a number."""
    return f"s{number % NUM_COLOURS}"


def short(value: float) -> str:
    """Return a place on the page in as few digits as the eye can tell apart."""
    return f"{value:.1f}".removesuffix(".0")


class Scale(NamedTuple):
    """A straight scale from values to places; `begin` may be below `end` or above it."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """Return the place of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def thin(series: Sequence[Sequence[float | None]], most: int = MOST_POINTS) -> list[int]:
    """Return which places of series of equal length are drawn: all, or the first, the last and what stands out.

    Of each stretch the least and the most of every series are kept, so that no peak is lost, and what is not finite.
    """
    length = len(series[0]) if series else 0
    if length <= most:
        return list(range(length))
    # Of each stretch two points of every series stay.
    width = math.ceil(length / max(10, most // (2 * len(series))))
    kept = {0, length - 1}
    for values in series:
        kept |= {place for place, value in enumerate(values) if value is not None and not math.isfinite(value)}
        for start in range(0, length, width):
            places = range(start, min(start + width, length))
            known = [(value, at) for at in places if (value := values[at]) is not None and math.isfinite(value)]
            kept |= {min(known)[1], max(known)[1]} if known else set()
    return sorted(kept)


COLOUR_STEPS = 4
"""Steps of colour on each side of zero, or from the lowest to the highest."""


def diverging(value: float | None, largest: float | None) -> str:
    """Return the step of a number around zero: n4 to n1, 0, p1 to p4; `none` where there is no number.

    `largest` is the size that has the deepest colour. What is not zero is never shown as zero.
    """
    if value is None or math.isnan(value):
        return "none"
    reach = min(abs(value) / largest, 1.0) if largest else 1.0
    # A quarter of the largest has the first step, whatever the division rounds to.
    return f"{'p' if value > 0 else 'n'}{max(1, math.ceil(COLOUR_STEPS * reach - 1e-9))}" if value else "0"


def sequential(value: float | None, lowest: float | None, highest: float | None) -> str:
    """Return the step of a number between the lowest and the highest: 0 to 4; `none` where there is no number."""
    if value is None or math.isnan(value) or lowest is None or highest is None:
        return "none"
    share = (value - lowest) / (highest - lowest) if highest > lowest else 1.0
    return str(math.floor(COLOUR_STEPS * min(max(share, 0.0), 1.0) + 1e-9))
