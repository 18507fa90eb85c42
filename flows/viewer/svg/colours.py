"""Colours as classes of the style sheets: steps of a scale for numbers, one for each stage."""

import math

from flows.reporting.svg import colour
from tasks.stages import BY_NAME, OTHER_COLOUR

STEPS = 4
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
    return f"{'p' if value > 0 else 'n'}{max(1, math.ceil(STEPS * reach - 1e-9))}"


def sequential(value: float | None, lowest: float | None, highest: float | None) -> str:
    """Return the step of a number between the lowest and the highest: 0 to 4; `none` where there is no number."""
    if value is None or math.isnan(value) or lowest is None or highest is None:
        return "none"
    if not highest > lowest:
        return str(STEPS)
    share = min(max((value - lowest) / (highest - lowest), 0.0), 1.0)
    return str(math.floor(STEPS * share + 1e-9))


def stage_number(stage: str) -> int:
    """Return the number of a stage's colour."""
    return BY_NAME[stage].colour if stage in BY_NAME else OTHER_COLOUR


def stage_class(stage: str) -> str:
    """Return the class of a stage's colour."""
    return colour(stage_number(stage))
