"""A metric: one number of a run by step, over all rollouts and by environment."""

from collections.abc import Mapping, Sequence
from typing import Any

from flows.viewer import addresses
from flows.viewer.data.metrics import Metric, ends, metrics
from flows.viewer.data.retired import retired_of
from flows.viewer.data.run_states import is_going
from flows.viewer.data.series import StepNumbers, numbers
from flows.viewer.drawing.svg import colour
from flows.viewer.library import Library
from flows.viewer.page import Asked, Crumb, NotThere, Page
from flows.views.identify import nearest

MOST_NUMBERS = 200
"""Steps in the table, the last ones, until asked for all."""
FROM_ZERO = ("share", "tokens", "tokens/s", "rollouts", "s", "turns", "steps", "nats")
"""Units whose scale begins at zero: twice as high is twice as much."""


def page(library: Library, asked: Asked) -> Page:
    """Return the page of a metric, named by its measure or in full: `reward/mean`, `reward/all/mean`.

    Asks: `numbers=all`. Raises NotThere, with the nearest names, where no step of the run has it.
    """
    run, name = asked.path["run"], asked.path["metric"]
    measured = numbers(library, run)
    known, gone = metrics(measured), retired_of(library, run)
    place = _place(known, run, name, bool(gone))
    found = known[place]
    steps = [_step(run, each) for each in measured]
    series = [_series(number, each, steps) for number, each in enumerate(found["series"])]
    values = {
        "run": run,
        "retired": gone,
        "metric": {**found, "series": series},
        "drawn": {
            "title": found["name"],
            "unit": found["unit"],
            "zero": found["unit"] in FROM_ZERO,
            "wide": True,
            "series": series,
        },
        "steps": steps,
        "previous": _beside(known, run, place - 1),
        "next": _beside(known, run, place + 1),
        "numbers_from": 0 if asked.one_of("numbers", ("all",)) else max(0, len(steps) - MOST_NUMBERS),
    }
    live = is_going(library.store.runs.events(run)[-1])
    return Page("metric.html", found["name"], values, (Crumb(run, addresses.run(run)),), live)


def _place(known: Sequence[Metric], run: str, name: str, gone: bool) -> int:
    for number, each in enumerate(known):
        if name == each["name"] or name in (one["name"] for one in each["series"]):
            return number
    near = nearest(name, [each["name"] for each in known])
    told = f"; the nearest names are {', '.join(near)}" if near else ""
    if gone:
        told += "; rows that it may have been in were dropped for their age (`stagecoach maintain --retain`)"
    raise NotThere(f"no step of the run {run!r} has the metric {name[:120]!r}{told}")


def _step(run: str, each: StepNumbers) -> dict[str, Any]:
    return {"step": each.step, "address": addresses.step(run, each.step), "finished": each.work.finished}


def _series(number: int, each: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a series as charts take it, with its ends."""
    told = ends(each["values"], [step["step"] for step in steps])
    return {
        "name": each["scope"] or each["name"],
        "metric": each["name"],
        "scope": each["scope"],
        "values": each["values"],
        "colour": colour(number),
        **told,
    }


def _beside(known: Sequence[Metric], run: str, place: int) -> dict[str, str] | None:
    if not 0 <= place < len(known):
        return None
    return {"name": known[place]["name"], "address": addresses.metric(run, known[place]["name"])}
