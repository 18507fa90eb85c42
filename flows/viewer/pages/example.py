"""An example: its task and all attempts at it over a run's history."""

import json
from typing import Any

import polars as pl

from flows.queries.reader import read_rollouts, sorted_rows
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.rollouts import attempts, by_step, example
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader, expired_rows_of_runs
from flows.viewer import addresses
from flows.viewer.addresses import Crumb, Page

MOST_RUNS = 12
"""Runs that a comparison is offered with: those that use the same environment, the newest first."""


def example_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return an example. Raises BadQuestion where it is not named, NotThere where the run does not have it."""
    run, (environment, example_id) = asked.path["run"], _named_example(asked)
    rows = attempts(library, run, environment, example_id)
    agents = rows["agent"].unique(maintain_order=True).to_list()
    agent = asked.one_of("agent", agents) if asked.text("agent") else ""
    rows = rows.filter(pl.col("agent") == agent) if agent else rows
    steps = by_step(rows)
    values = {
        "run": run,
        "retired": expired_rows_of_runs(library, run),
        "environment": environment,
        "example_id": example_id,
        **_task(example(library, run, environment, example_id)),
        "pass_reward": library.config(run).evaluation.pass_reward,
        "agents": agents,
        "agent": agent,
        "num_attempts": len(rows),
        "overall": _overall(rows),
        "by_step": [_at(run, each) for each in steps.to_dicts()],
        "charts": _charts(run, steps),
        "attempts": [
            each | {"address": addresses.trace(run, each["trace_id"], each["key"]), "here": False}
            for each in rows.to_dicts()
        ],
        "read": read_rollouts(library, run, sorted_rows(rows, asked), asked),
        "others": _others(library, run, environment),
    }
    way = (Crumb(run, addresses.run(run)),)
    return Page("example.html", f"{environment} / {example_id}", values, way, any_going(library, run))


def _named_example(asked: PageRequest) -> tuple[str, str]:
    """Return the environment and the id that are asked for. Raises BadQuestion where one of them is not named."""
    environment, example_id = asked.text("environment"), asked.text("id")
    if not (environment and example_id):
        raise BadQuestion("an example is named by its environment and its id: ?environment=...&id=...")
    return environment, example_id


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
        passed = int(own["passed"].sum())
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


def _charts(run: str, steps: pl.DataFrame) -> list[dict[str, Any]]:
    """Return pass rate and mean reward by step, for training and for evaluations, as `drawings.chart` draws them.

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
    along = [{"step": each, "address": addresses.step(run, each)} for each in numbers]
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


def _others(library: StoreReader, run: str, environment: str) -> list[str]:
    """Return further runs whose configs have the environment, the newest first."""
    found: list[str] = []
    for name in reversed(library.store.runs.names()):
        config = next((each.config for each in reversed(library.store.runs.events(name)) if each.config), {})
        if name != run and any(each.get("name") == environment for each in config.get("environments", ())):
            found.append(name)
    return found[:MOST_RUNS]
