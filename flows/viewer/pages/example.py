"""An example: its task, and all attempts at it over a run's history, in training and in evaluations."""

import json
from typing import Any

import polars as pl

from flows.viewer import addresses
from flows.viewer.data.example import PASS_REWARD, attempts, by_step, example
from flows.viewer.data.retired import retired_of
from flows.viewer.data.run_states import is_going
from flows.viewer.library import Library
from flows.viewer.page import Asked, BadQuestion, Crumb, Page

PER_PAGE = 200
MOST_RUNS = 12
"""Runs that a comparison is offered with: those that use the same environment, the newest first."""


def page(library: Library, asked: Asked) -> Page:
    """Return an example. Raises BadQuestion where it is not named, NotThere where the run does not have it."""
    run = asked.path["run"]
    environment, example_id = asked.text("environment"), asked.text("id")
    if not (environment and example_id):
        raise BadQuestion("an example is named by its environment and its id: ?environment=...&id=...")
    rows = attempts(library, run, environment, example_id)
    agents = rows["agent"].unique(maintain_order=True).to_list()
    agent = asked.one_of("agent", agents) if asked.text("agent") else ""
    rows = rows.filter(pl.col("agent") == agent) if agent else rows
    steps = by_step(rows)
    number = asked.number("page", 0, most=max(len(rows) - 1, 0) // PER_PAGE)
    listed = [_shown(run, each) for each in rows.to_dicts()]
    values = {
        "run": run,
        "retired": retired_of(library, run),
        "environment": environment,
        "example_id": example_id,
        **_task(example(library, run, environment, example_id)),
        "pass_reward": PASS_REWARD,
        "agents": agents,
        "agent": agent,
        "num_attempts": len(rows),
        "overall": _overall(rows),
        "by_step": [_at(run, each) for each in steps.to_dicts()],
        "charts": _charts(run, steps),
        "attempts": listed,
        "first": number * PER_PAGE,
        "per_page": PER_PAGE,
        "page_number": number,
        "num_pages": -(-len(rows) // PER_PAGE),
        "others": _others(library, run, environment),
    }
    crumbs = (Crumb(run, addresses.run(run)),)
    live = is_going(library.store.runs.events(run)[-1])
    return Page("example.html", f"{environment} / {example_id}", values, crumbs, live)


def _task(found: dict[str, Any] | None) -> dict[str, Any]:
    """Return the task as it was listed, and its prompt where it has one under that name."""
    if found is None:
        return {"split": None, "task": None, "prompt": None}
    try:
        task = json.loads(found["task"])
    except (ValueError, RecursionError):
        task = found["task"]
    prompt = task.get("prompt") if isinstance(task, dict) else None
    return {"split": found["split"], "task": task, "prompt": prompt if isinstance(prompt, str) else None}


def _overall(rows: pl.DataFrame) -> dict[str, Any]:
    """Return how all attempts went, in training and in evaluations."""
    found = {}
    for name, own in (("training", rows.filter("for_training")), ("evaluations", rows.filter(~pl.col("for_training")))):
        scored = own["reward"].drop_nulls()
        passed = int((scored >= PASS_REWARD).sum())
        found[name] = {
            "num_attempts": len(own),
            "num_scored": len(scored),
            "num_failed": len(own) - own["error_class"].null_count(),
            "reward": scored.mean(),
            "num_passed": passed,
            "pass_rate": passed / len(scored) if len(scored) else None,
        }
    return found


def _at(run: str, row: dict[str, Any]) -> dict[str, Any]:
    where = addresses.step if row["for_training"] else addresses.evaluation
    return row | {"address": where(run, row["step"])}


def _shown(run: str, row: dict[str, Any]) -> dict[str, Any]:
    return row | {"address": addresses.trace(run, row["trace_id"], row["key"]), "here": False}


def _charts(run: str, steps: pl.DataFrame) -> list[dict[str, Any]]:
    """Return pass rate and mean reward by step, for training and for evaluations, as `drawing.charts` draws them.

    Several agents and sets of one step are taken together, weighed by their attempts.
    """
    scored = steps.filter(pl.col("num_scored") > 0)
    weighed = pl.col("reward") * pl.col("num_scored")
    whole = scored.group_by("step", "for_training").agg(
        pass_rate=pl.col("num_passed").sum() / pl.col("num_scored").sum(),
        reward=weighed.sum() / pl.col("num_scored").sum(),
    )
    numbers = sorted(set(whole["step"]))
    if len(numbers) < 2:
        return []  # one point is in the table
    along = [{"step": each, "address": addresses.step(run, each), "finished": True} for each in numbers]
    return [
        {"title": title, "zero": True, "steps": along, "series": series}
        for title, name in (("Pass rate", "pass_rate"), ("Mean reward", "reward"))
        if (series := _series(whole, name, numbers))
    ]


def _series(whole: pl.DataFrame, name: str, numbers: list[int]) -> list[dict[str, Any]]:
    found = []
    for title, training in (("training", True), ("evaluations", False)):
        own = dict(whole.filter(pl.col("for_training") == training).select("step", name).iter_rows())
        if own:
            found.append({"name": title, "values": [own.get(step) for step in numbers]})
    return found


def _others(library: Library, run: str, environment: str) -> list[str]:
    """Return further runs whose configs have the environment, the newest first."""
    names = [name for name in reversed(library.store.runs.names()) if name != run]
    return [name for name in names if _has(library, name, environment)][:MOST_RUNS]


def _has(library: Library, run: str, environment: str) -> bool:
    config = next((each.config for each in reversed(library.store.runs.events(run)) if each.config), {})
    return any(each.get("name") == environment for each in config.get("environments", ()))
