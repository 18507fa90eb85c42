"""An example: its task and all attempts at it, over a run's history or of two runs side by side."""

import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from flows.queries.compare_traces import (
    TOKEN_MEASURES,
    changed_measures,
    compared_attempts,
    compared_tokens,
    moments,
    side_by_side,
    turns,
    typical,
)
from flows.queries.messages import messages
from flows.queries.reader import read_rollouts, sorted_rows
from flows.queries.request import BadQuestion, NotThere, PageRequest
from flows.queries.rollouts import attempts, by_step, example
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader, expired_rows_of_runs
from flows.queries.trace import find_trace
from flows.reporting.svg import diverging
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


def _others(library: StoreReader, run: str, environment: str) -> list[str]:
    """Return further runs whose configs have the environment, the newest first."""
    found: list[str] = []
    for name in reversed(library.store.runs.names()):
        config = next((each.config for each in reversed(library.store.runs.events(name)) if each.config), {})
        if name != run and any(each.get("name") == environment for each in config.get("environments", ())):
            found.append(name)
    return found[:MOST_RUNS]


MOST_TOKENS = 2_000
"""Tokens of a rollout that are shown; the frame has all."""
Attempt = Mapping[str, Any]


def compare_example_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return the attempts of two runs at an example.

    `step_a` or `version_a` (an evaluation) choose when, `trace_a` which attempt; the same for b. `agent` chooses whose
    attempts, where there are several.
    """
    a, b, (environment, example_id) = asked.path["a"], asked.path["b"], _named_example(asked)
    attempts = compared_attempts(library, a, b, environment, example_id)
    agents = attempts["agent"].unique().sort().to_list()
    agent = asked.one_of("agent", agents, agents[0])
    attempts = attempts.filter(agent=agent)
    when = moments(attempts)
    sides = {side: _side(asked, side, attempts, when, a == b) for side in "ab"}
    chosen = _choose_attempts(asked, sides)
    values = {
        "retired": expired_rows_of_runs(library, a, b),
        **{"a": a, "b": b, "environment": environment, "example_id": example_id},
        **{"agents": agents, "agent": agent},
        **{f"of_{side}": {**own, "attempts": own["attempts"].to_dicts()} for side, own in sides.items()},
        **{f"chosen_{side}": dict(each) if each else None for side, each in chosen.items()},
        **_beside(library, asked, chosen),
    }
    crumbs = (Crumb(a, addresses.run(a)), Crumb(f"{a} and {b}", addresses.compare(a, b)))
    return Page("compare_example.html", f"{environment} {example_id}", values, crumbs, any_going(library, a, b))


def _side(asked: PageRequest, side: str, attempts: pl.DataFrame, when: pl.DataFrame, one_run: bool) -> dict[str, Any]:
    """Return when a side tried the example, which of these is shown, and the attempts then."""
    own = when.filter(pl.col("side") == side)
    step, version = (asked.text(f"{name}_{side}") for name in ("step", "version"))
    if step and version:
        raise BadQuestion(f"step_{side} and version_{side} choose different things: leave one out")
    shown: dict[str, Any] | None = None
    if step or version:
        wanted = asked.number(f"step_{side}" if step else f"version_{side}", 0)
        same = own.filter((pl.col("step") == wanted) & (pl.col("for_training") == bool(step)))
        shown = {"step": wanted, "for_training": bool(step)} if same.is_empty() else same.row(0, named=True)
    elif own.height:
        # Of one run with itself, the first attempts stand beside the last; training comes before evaluations.
        training = own.filter("for_training")
        known = training if training.height else own
        shown = known.row(0 if one_run and side == "a" else -1, named=True)
    then = attempts.clear()
    if shown:
        at = (pl.col("step") == shown["step"]) & (pl.col("for_training") == shown["for_training"])
        then = attempts.filter((pl.col("side") == side) & at)
    mean = then["reward"].mean()
    return {"moments": own.to_dicts(), "shown": shown, "attempts": then, "reward": mean}


def _choose_attempts(asked: PageRequest, sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Attempt | None]:
    """Return the attempt of each side that is looked at: the one asked for, or one whose reward is typical.

    Where nothing was asked for and both sides have the same rollouts, it is the same one.
    """
    found: dict[str, Attempt | None] = {}
    for side, own in sides.items():
        wanted = asked.text(f"trace_{side}")
        rows = own["attempts"]
        if wanted:
            same = rows.filter(pl.col("trace_id") == wanted)
            if same.is_empty():
                raise NotThere(f"trace_{side}={wanted[:80]!r} is none of the attempts of {side} that are shown")
            found[side] = same.row(0, named=True)
        else:
            found[side] = typical(rows)
    first = found["a"]
    if first and not asked.text("trace_b"):
        same = sides["b"]["attempts"].filter(pl.col("trace_id") == first["trace_id"])
        found["b"] = same.row(0, named=True) if same.height else found["b"]
    return found


def _beside(library: StoreReader, asked: PageRequest, chosen: Mapping[str, Attempt | None]) -> dict[str, Any]:
    """Return the chosen attempts next to each other."""
    empty: dict[str, Any] = {"texts": None, "tokens": None}
    one, other = chosen["a"], chosen["b"]
    if one is None and other is None:
        return empty
    traces = [each and find_trace(library, each["run"], each["trace_id"], each["key"]) for each in (one, other)]
    spoken = [turns(messages(library, each)) if each else [] for each in traces]
    found = empty | {"texts": side_by_side(*spoken)}
    if traces[0] and traces[1] and traces[0].trace_id == traces[1].trace_id:
        found["tokens"] = _tokens(asked, compared_tokens(library, traces[0], traces[1]))
    return found


def _tokens(asked: PageRequest, rows: pl.DataFrame) -> dict[str, Any]:
    """Return the tokens of a rollout that both runs have, coloured by how far a measure is apart."""
    changed = changed_measures(rows)
    by = asked.one_of("by", TOKEN_MEASURES, next((name for name in TOKEN_MEASURES if changed[name]), TOKEN_MEASURES[0]))
    apart = rows[f"{by}_difference"].abs().max()
    largest = None if apart is None else float(str(apart))
    names = {"before": f"{by}_a", "after": f"{by}_b", "difference": f"{by}_difference"}
    shown = [
        {
            "text": row["text"] if row["text"] is not None else f"[{row['token_id']}]",
            "message": row["message"],
            **{name: row[column] for name, column in names.items()},
            "level": diverging(row[names["difference"]], largest),
        }
        for row in rows.head(MOST_TOKENS).iter_rows(named=True)
    ]
    return {"by": by, "measures": changed, "largest": largest, "num_tokens": rows.height, "shown": shown}
