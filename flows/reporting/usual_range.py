"""Where a figure of a run leaves the range that it had at first: one rule for the run's page and all summaries.

The band of a figure is what it was at first: from half to twice the median of its first ten values. It leaves the band
at the first step from which on five values in a row lie outside. A figure whose first ten values are mostly zero leaves
it where five in a row are above zero. One that is mostly below zero at first has no band.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from flows.reporting.figures import chart_rows
from flows.reporting.svg import is_drawn
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
    numbers, metrics = [step["step"] for step in steps], [step.get("metrics", {}) for step in steps]
    series = {title: [values.get(full_name(*name)) for values in metrics] for title, name in FIGURES.items()}
    exits = ((title, band_exit(values, numbers)) for title, values in series.items())
    return sorted(({"title": title, **left} for title, left in exits if left), key=lambda left: left["step"])


def describe_exits(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return `range_exits` in one line; empty where every figure stayed in its band."""
    exits = [f"{left['title']} {left['description']}" for left in range_exits(steps)]
    return f"outside its usual range: {'; '.join(exits)}" if exits else ""


def band_exit(values: Sequence[float | None], steps: Sequence[int]) -> dict[str, Any] | None:
    """Return the first `step` at which a figure leaves its band, with a `description`; None while it stays."""
    known = [(value, step) for value, step in zip(values, steps, strict=True) if value is not None and is_drawn(value)]
    if len(known) < FIRST + IN_A_ROW:
        return None
    usual = statistics.median(value for value, _ in known[:FIRST])
    if usual < 0:
        return None
    outside = [not usual / TIMES <= value <= usual * TIMES for value, _ in known]
    for place in range(FIRST, len(known) - IN_A_ROW + 1):
        if all(outside[place : place + IN_A_ROW]):
            step, now = known[place][1], statistics.median(value for value, _ in known[-IN_A_ROW:])
            return {"step": step, "description": _exit_in_words(step, usual, now)}
    return None


def _exit_in_words(step: int, usual: float, now: float) -> str:
    if usual / TIMES <= now <= usual * TIMES:
        return f"left its band at step {step}, and is back"
    if not usual:
        return f"above zero since step {step}"
    if not now:
        return f"fell to zero since step {step}"
    return f"{'grew' if now > usual else 'fell'} to {now / usual:.2g} x since step {step}"
