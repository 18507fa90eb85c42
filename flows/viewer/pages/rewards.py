"""Rewards that were tried on the rollouts of a run, beside the recorded one."""

from typing import Any

from flows.queries.request import NotThere, PageRequest
from flows.queries.reward_figures import kept_figures
from flows.queries.store_reader import StoreReader
from flows.reporting.svg import colour
from flows.viewer import addresses
from flows.viewer.addresses import Page

LINES = ("recorded", "score")


def rewards_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return the tries of a run that `stagecoach reward try` kept, `name` the one that is shown.

    Raises NotThere for an unknown run, and for one without a try of that name.
    """
    run = request.path["run"]
    reader.history(run)
    tries = kept_figures(reader.store.root, run)
    if not tries:
        raise NotThere(f"no reward was tried on run {run!r}; do so with stagecoach reward try FUNCTION {run}")
    name = request.text("name") or next(iter(tries))
    if name not in tries:
        raise NotThere(f"no reward {name!r} was tried on run {run!r}; those that were: {', '.join(tries)}")
    figures = tries[name]
    steps = [row for row in figures["by_step"] if row["run"] == run]
    flips = [
        {**row, "address": addresses.trace(row["run"], row["trace_id"]), "rollout": row["trace_id"]}
        for row in figures["flips"]["first"]
    ]
    groups = [{**row, "address": addresses.step(row["run"], row["step"])} for row in figures["groups"]["first"]]
    values: dict[str, Any] = {
        "run": run,
        "names": list(tries),
        "name": name,
        "figures": figures,
        "flips": flips,
        "groups": groups,
    }
    values |= {
        "steps": [{"step": row["step"], "address": addresses.step(run, row["step"])} for row in steps],
        "drawn": _chart_of(steps),
    }
    return Page("rewards.html", "Rewards tried", values, ((run, addresses.run(run)),))


def _chart_of(steps: list[dict[str, Any]]) -> dict[str, Any]:
    series = [
        {"name": line, "values": [row[line] for row in steps], "colour": colour(place)}
        for place, line in enumerate(LINES)
    ]
    return {"title": "Mean by step", "unit": "", "wide": True, "series": series}
