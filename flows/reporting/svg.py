"""Places, round numbers and steps of colour of drawings."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NUM_COLOURS = 8
"""Classes `s0` to `s7` of the style sheet."""


def colour(number: int) -> str:
    """Return the class that colours the series of a number."""
    return f"s{number % NUM_COLOURS}"


def short(value: float) -> str:
    """Return a place on the page in as few digits as the eye can tell apart."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


MOST_POINTS = 220
"""Points of a line that are drawn; of more, the least and the most of each stretch are kept."""
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Scale:
    """A straight scale from values to places; `begin` may be below `end` or above it."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """Return the place of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self, most: int = 5) -> list[float]:
        """Return round numbers along the scale, as many as there may be."""
        closer = ticks(self.low, self.high, most + 1)  # steps that are a little too small by the rule may fit
        return closer if len(closer) <= most else ticks(self.low, self.high, most)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers within [low, high], steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / (most - 1)
    exponent = math.floor(math.log10(rough))
    power = 10.0**exponent
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    # To a digit of the width, however small it is: 3 * 0.2 is 0.6, and 1e-14 is not zero.
    return [round(number * width, 1 - exponent) for number in range(first, last + 1)]


def around(values: Iterable[float], zero: bool = False) -> tuple[float, float]:
    """Return the ends of a scale for values: a little room around them; with `zero` it begins at zero.

    Values that are not finite are left out; without any, the scale is that from 0 to 1.
    """
    finite = [value for value in values if math.isfinite(value)] + ([0.0] if zero else [])
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if low == high:
        room = abs(low) / 2 or 0.5
        return (low, high + 2 * room) if zero and low == 0 else (low - room, high + room)
    # So that lines do not run along the edge.
    room = (high - low) * 0.06
    return (low if zero and low == 0 else low - room), (high if zero and high == 0 else high + room)


def label(value: float) -> str:
    """Return a tick as text, short enough to stand beside an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        size, unit = next((size, unit) for size, unit in _UNITS if abs(value) >= size)
        return f"{value / size:g}{unit}"
    if abs(value) < 0.001:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:g}"


def thin(series: Sequence[Sequence[float | None]], most: int = MOST_POINTS) -> list[int]:
    """Return which places of series of equal length are drawn: all, or the first, the last and what stands out.

    Of each stretch the least and the most of every series are kept, so that no peak is lost, and what is not finite.
    """
    length = len(series[0]) if series else 0
    if length <= most:
        return list(range(length))
    # Of each stretch two points of every series stay.
    stretches = max(10, most // (2 * len(series)))
    width = math.ceil(length / stretches)
    kept = {0, length - 1}
    for values in series:
        kept |= {place for place, value in enumerate(values) if value is not None and not math.isfinite(value)}
        for start in range(0, length, width):
            known = [(values[at], at) for at in range(start, min(start + width, length)) if is_drawn(values[at])]
            kept |= {min(known)[1], max(known)[1]} if known else set()
    return sorted(kept)


def is_drawn(value: float | None) -> bool:
    """Say whether a value has a place on a scale."""
    return value is not None and math.isfinite(value)


COLOUR_STEPS = 4
"""Steps of colour on each side of zero, or from the lowest to the highest."""


def diverging(value: float | None, largest: float | None) -> str:
    """Return the step of a number around zero: n4 to n1, 0, p1 to p4; `none` where there is no number.

    `largest` is the size that has the deepest colour. What is not zero is never shown as zero.
    """
    if value is None or math.isnan(value):
        return "none"
    if value == 0:
        return "0"
    reach = 1.0 if not largest else min(abs(value) / largest, 1.0)
    # A quarter of the largest has the first step, whatever the division rounds to.
    return f"{'p' if value > 0 else 'n'}{max(1, math.ceil(COLOUR_STEPS * reach - 1e-9))}"


def sequential(value: float | None, lowest: float | None, highest: float | None) -> str:
    """Return the step of a number between the lowest and the highest: 0 to 4; `none` where there is no number."""
    if value is None or math.isnan(value) or lowest is None or highest is None:
        return "none"
    if not highest > lowest:
        return str(COLOUR_STEPS)
    share = min(max((value - lowest) / (highest - lowest), 0.0), 1.0)
    return str(math.floor(COLOUR_STEPS * share + 1e-9))
