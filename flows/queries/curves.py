"""How curves are shown: smoothed, over steps, tokens or time, of several runs together."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from flows.queries.metrics import StepNumbers
from flows.reporting.svg import is_drawn
from tasks.metrics.figures import ALL

AXES = ("step", "tokens", "time")
"""What curves may be drawn over: steps, tokens sampled so far, or minutes of work so far."""
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
