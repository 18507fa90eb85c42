"""Where a figure of a run left the range that it had at first: one rule for the run's page and all summaries.

The band of a figure is what it was at first: from half to twice the median of its first ten values. It has left the
band where its last five values or more lie outside, at the first of these. A figure whose first ten values are mostly
zero leaves it above or below zero; one that is mostly below zero at first has no band.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from flows.reporting.figures import chart_rows
from tasks.metrics.figures import ALL, full_name

FIRST, IN_A_ROW, TIMES = 10, 5, 2.0
"""Values that make a band, values outside that leave it, and how far it reaches."""
FIGURES = {
    chart["title"]: (ALL if "scope" in chart["series"][0] else "", chart["series"][0]["measure"])
    for chart in chart_rows()
    if chart.get("band")
}
"""Scope and measure of each metric that has a band, by the title of its chart."""


def range_exits(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the figures that left their bands: title, step and description, the earliest first.

    Each step has `step` and `metrics`, values by full name; a missing value is not zero.
    """
    numbers = [step["step"] for step in steps]
    series = {
        title: [step.get("metrics", {}).get(full_name(*name)) for step in steps] for title, name in FIGURES.items()
    }
    exits = ((title, band_exit(values, numbers)) for title, values in series.items())
    return sorted(({"title": title, **left} for title, left in exits if left), key=lambda left: left["step"])


def describe_exits(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return `range_exits` in one line; empty where every figure stayed in its band."""
    exits = [f"{left['title']} {left['description']}" for left in range_exits(steps)]
    return f"outside its usual range: {'; '.join(exits)}" if exits else ""


def band_exit(values: Sequence[float | None], steps: Sequence[int]) -> dict[str, Any] | None:
    """Return the `step` since which a figure lies outside its band, with a `description`; None where it does not."""
    pairs = zip(values, steps, strict=True)
    known = [(value, step) for value, step in pairs if value is not None and math.isfinite(value)]
    usual = statistics.median([value for value, _ in known[:FIRST]] or [0.0])
    inside = [place for place, (value, _) in enumerate(known) if usual / TIMES <= value <= usual * TIMES]
    first = max([FIRST, *(place + 1 for place in inside)])
    if usual < 0 or len(known) < first + IN_A_ROW:
        return None
    step, now = known[first][1], statistics.median(value for value, _ in known[-IN_A_ROW:])
    if usual and now > 0:
        moved = f"{'grew' if now > usual else 'fell'} to {now / usual:.2g} x"
    else:
        moved = "above zero" if now > 0 else "below zero" if now < 0 else "fell to zero"
    return {"step": step, "description": f"{moved} since step {step}"}
