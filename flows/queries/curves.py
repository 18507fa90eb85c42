"""How curves are shown: smoothed, over steps, tokens or time, of several runs together, and where one leaves its band.

The band of a figure is what it was at first: from half to twice the median of its first ten values. It leaves the band
at the first step from which on five values in a row lie outside. A figure whose first ten values are mostly zero leaves
it where five in a row are above zero. One that is mostly below zero at first has no band.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from flows.queries.metrics import StepNumbers
from flows.reporting.svg import is_drawn
from tasks.metrics.figures import ALL

AXES = ("step", "tokens", "time")
"""What curves may be drawn over: steps, tokens sampled so far, or minutes of work so far."""
FIRST, IN_A_ROW, TIMES = 10, 5, 2.0
"""Values that make a band, values outside that leave it, and how far it reaches."""
Chart = dict[str, Any]


def smooth(values: Sequence[float | None], steps: int) -> list[float | None]:
    """Return the mean of each value and those known among the `steps` - 1 before it; what is unknown stays so."""
    window: deque[float | None] = deque(maxlen=steps)
    found = []
    for value in values:
        window.append(value)
        known = [each for each in window if each is not None and is_drawn(each)]
        found.append(sum(known) / len(known) if known and is_drawn(value) else value)
    return found


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


def positions(steps: Sequence[StepNumbers], axis: str) -> list[float]:
    """Return where the end of each step lies on an axis; of work that was taken over, its time in the other run."""
    if axis == "step":
        return [float(each.step) for each in steps]
    if axis == "tokens":
        return list(accumulate(each.value("rollout/output_tokens", ALL) or 0.0 for each in steps))
    spent = (
        sum(value for (_, name), value in each.values.items() if name.startswith("timing/stage/")) for each in steps
    )
    return [seconds / 60 for seconds in accumulate(spent)]


def together(sections_of_runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return sections whose charts show one figure of several runs each: a line for each run that has it.

    Each series has the `steps` of its run, and the first run's come first: what it has not is `by_step` of nobody. What
    has no line is left out: a scatter, a heat map.
    """
    found: dict[str, dict[str, Chart]] = {}
    for run, sections in sections_of_runs.items():
        for section in sections:
            charts = found.setdefault(section["title"], {})
            for chart in section["charts"]:
                for series in () if chart.get("over") or chart.get("cells") else chart["series"]:
                    name = f"{chart['title']}: {series['name']}" if len(chart["series"]) > 1 else chart["title"]
                    kind = None if series.get("kind") == "bars" else series.get("kind")
                    place = list(sections_of_runs).index(run)
                    own = {**series, "name": run, "kind": kind, "place": place}
                    made = {**chart, "title": name, "series": [], "exit": None}
                    made["by_step"] = not place and chart.get("by_step")
                    same = charts.setdefault(name, made)
                    same["series"].append({**own, "steps": chart["steps"]})
    return [{"title": title, "charts": list(charts.values())} for title, charts in found.items()]


def is_flat_zero(chart: Mapping[str, Any]) -> bool:
    """Say whether all that a chart shows is zero."""
    return not any(value for series in chart["series"] for value in series["values"])
