"""Two policies on the same example: their attempts side by side, and two of these word by word, or token by token."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from flows.viewer import addresses
from flows.viewer.data.compare_attempts import compared_attempts, moments, typical
from flows.viewer.data.compare_texts import side_by_side, turns
from flows.viewer.data.compare_tokens import MEASURES, changed_measures, compared_tokens
from flows.viewer.data.retired import retired_of
from flows.viewer.data.trace import find_trace
from flows.viewer.drawing.levels import diverging
from flows.viewer.library import Library
from flows.viewer.page import Asked, BadQuestion, Crumb, NotThere, Page
from flows.viewer.pages.compare import is_going

MOST_TOKENS = 2_000
"""Tokens of a rollout that are shown; the frame has all."""
Attempt = Mapping[str, Any]


def page(library: Library, asked: Asked) -> Page:
    """Return the attempts of two runs at an example.

    `step_a` or `version_a` (an evaluation) choose when, `trace_a` which attempt; the same for b. `agent` chooses whose
    attempts, where there are several.
    """
    a, b = asked.path["a"], asked.path["b"]
    environment, example_id = asked.text("environment"), asked.text("id")
    if not (environment and example_id):
        raise BadQuestion("an example is named by its environment and its id: ?environment=...&id=...")
    attempts = compared_attempts(library, a, b, environment, example_id)
    agents = attempts["agent"].unique().sort().to_list()
    agent = asked.one_of("agent", agents, agents[0])
    attempts = attempts.filter(agent=agent)
    when = moments(attempts)
    sides = {side: _side(asked, side, attempts, when, a == b) for side in "ab"}
    chosen = _chosen(asked, sides)
    values = {
        "retired": retired_of(library, a, b),
        **{"a": a, "b": b, "environment": environment, "example_id": example_id},
        **{"agents": agents, "agent": agent},
        **{f"of_{side}": {**own, "attempts": own["attempts"].to_dicts()} for side, own in sides.items()},
        **{f"chosen_{side}": dict(each) if each else None for side, each in chosen.items()},
        **_beside(library, asked, chosen),
    }
    crumbs = (Crumb(a, addresses.run(a)), Crumb(f"{a} and {b}", addresses.compare(a, b)))
    return Page("compare_example.html", f"{environment} {example_id}", values, crumbs, is_going(library, a, b))


def _side(asked: Asked, side: str, attempts: pl.DataFrame, when: pl.DataFrame, one_run: bool) -> dict[str, Any]:
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


def _chosen(asked: Asked, sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Attempt | None]:
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


def _beside(library: Library, asked: Asked, chosen: Mapping[str, Attempt | None]) -> dict[str, Any]:
    """Return the chosen attempts next to each other."""
    empty: dict[str, Any] = {"texts": None, "tokens": None}
    one, other = chosen["a"], chosen["b"]
    if one is None and other is None:
        return empty
    traces = [each and find_trace(library, each["run"], each["trace_id"], each["key"]) for each in (one, other)]
    spoken = [turns(library, each) if each else [] for each in traces]
    found = empty | {"texts": side_by_side(*spoken)}
    if traces[0] and traces[1] and traces[0].trace_id == traces[1].trace_id:
        found["tokens"] = _tokens(asked, compared_tokens(library, traces[0], traces[1]))
    return found


def _tokens(asked: Asked, rows: pl.DataFrame) -> dict[str, Any]:
    """Return the tokens of a rollout that both runs have, coloured by how far a measure is apart."""
    changed = changed_measures(rows)
    by = asked.one_of("by", MEASURES, next((name for name in MEASURES if changed[name]), MEASURES[0]))
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
