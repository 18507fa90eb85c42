"""An example: its task and all attempts at it over a run's history."""

from typing import Any

import polars as pl

from flows.queries.reader import read_json, read_rollouts, sorted_rows
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.rollouts import attempts, by_step, example
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader, expired_rows_of_runs
from flows.viewer import addresses
from flows.viewer.addresses import Page

MOST_RUNS = 12
"""Runs that a comparison is offered with: those that use the same environment, the newest first."""
KINDS = {"training": True, "evaluations": False}
"""Attempts by `for_training`."""


def example_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return an example. Raises BadQuestion where it is not named, NotThere where the run does not have it."""
    run, (environment, example_id) = request.path["run"], named_example(request)
    rows = attempts(reader, run, environment, example_id)
    agents = rows["agent"].unique(maintain_order=True).to_list()
    agent = request.one_of("agent", agents) if request.text("agent") else ""
    rows = rows.filter(agent=agent) if agent else rows
    steps, listed = by_step(rows), example(reader, run, environment, example_id) or {"split": None, "task": None}
    task = read_json(listed["task"])
    prompt = task.get("prompt") if isinstance(task, dict) else None
    values = {
        **{"run": run, "environment": environment, "example_id": example_id, "agents": agents, "agent": agent},
        "retired": expired_rows_of_runs(reader, run),
        **{"split": listed["split"], "task": task, "prompt": prompt if isinstance(prompt, str) else None},
        "pass_reward": reader.config(run).evaluation.pass_reward,
        "num_attempts": len(rows),
        "overall": {name: _overall(rows.filter(for_training=kind)) for name, kind in KINDS.items()},
        "by_step": [row | {"address": _address(run, row)} for row in steps.to_dicts()],
        "charts": _charts(run, steps),
        "attempts": [
            row | {"address": addresses.trace(run, row["trace_id"], row["key"]), "here": False}
            for row in rows.to_dicts()
        ],
        "read": read_rollouts(reader, run, sorted_rows(rows, request), request),
        "others": _others(reader, run, environment),
    }
    crumbs = ((run, addresses.run(run)),)
    return Page("example.html", f"{environment} / {example_id}", values, crumbs, any_going(reader, run))


def _address(run: str, row: dict[str, Any]) -> str:
    where = addresses.step if row["for_training"] else addresses.evaluation
    return where(run, row["step"])


def named_example(request: PageRequest) -> tuple[str, str]:
    """Return the environment and the id that the request names. Raises BadQuestion where one of them is missing."""
    environment, example_id = request.text("environment"), request.text("id")
    if not (environment and example_id):
        raise BadQuestion("an example is named by its environment and its id: ?environment=...&id=...")
    return environment, example_id


def _overall(rows: pl.DataFrame) -> dict[str, Any]:
    scored, passed = rows["reward"].drop_nulls(), int(rows["passed"].sum())
    return {
        "num_attempts": len(rows),
        "num_scored": len(scored),
        "num_failed": len(rows) - rows["error_class"].null_count(),
        "reward": scored.mean(),
        "num_passed": passed,
        "pass_rate": passed / len(scored) if len(scored) else None,
    }


def _charts(run: str, steps: pl.DataFrame) -> list[dict[str, Any]]:
    """Return pass rate and mean reward by step, for training and for evaluations, as `drawings.chart` draws them.

    Several agents and sets of one step are taken together, weighed by their attempts.
    """
    num_scored = pl.col("num_scored")
    scored = steps.filter(num_scored > 0).group_by("step", "for_training")
    means = scored.agg(
        pass_rate=pl.col("num_passed").sum() / num_scored.sum(),
        reward=(pl.col("reward") * num_scored).sum() / num_scored.sum(),
    )
    numbers = sorted(set(means["step"]))
    if len(numbers) < 2:
        return []  # one point is in the table
    along = [{"step": number, "address": addresses.step(run, number)} for number in numbers]
    charts = []
    for title, name in (("Pass rate", "pass_rate"), ("Mean reward", "reward")):
        of_kinds = {of: means.filter(for_training=kind).select("step", name) for of, kind in KINDS.items()}
        columns = {of: dict(rows.iter_rows()) for of, rows in of_kinds.items() if len(rows)}
        series = [{"name": of, "values": [column.get(step) for step in numbers]} for of, column in columns.items()]
        charts.append({"title": title, "zero": True, "steps": along, "series": series})
    return charts


def _others(reader: StoreReader, run: str, environment: str) -> list[str]:
    """Return further runs whose configs have the environment, the newest first."""
    others: list[str] = []
    for name in reversed(reader.store.runs.names()):
        config = next((event.config for event in reversed(reader.store.runs.events(name)) if event.config), {})
        if name != run and any(section.get("name") == environment for section in config.get("environments", ())):
            others.append(name)
    return others[:MOST_RUNS]
