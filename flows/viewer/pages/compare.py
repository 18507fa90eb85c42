"""compare_page: two runs, with a part for one step of both and a part for their attempts at one example."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from flows.queries.compare import DIFFERENT, ONLY_A, ONLY_B, SAME, compare, figures_of
from flows.queries.compare_rows import compared_attempts, compared_groups, compared_traces, step_detail
from flows.queries.compare_summary import sentences
from flows.queries.messages import messages
from flows.queries.reader import conversation
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader, expired_rows_of_runs
from flows.queries.trace import find_trace
from flows.viewer import addresses
from flows.viewer.addresses import Page
from tasks.metrics.figures import MEANINGS
from tasks.stages import COMPARED, EVALUATION

MAX_GROUPS = 200
"""Groups of a step that are listed."""
CLASSES = {SAME: "same", DIFFERENT: "different", ONLY_A: "lone_a", ONLY_B: "lone_b"}
"""The style of each state of a result."""
Values = dict[str, Any]


def compare_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return the comparison of run `a` with run `b`. Raises BadQuestion where one of them is not named, NotThere.

    `step` adds the part of a step; `environment` and `id` that of an example, `trace_a` and `trace_b` its attempts.
    """
    a, b = request.text("a"), request.text("b")
    if not (a and b):
        raise BadQuestion("choose two runs to compare: one in the column A, another in the column B")
    comparison, example_id = compare(reader, a, b), request.text("id")
    values = {
        **{name: comparison[name] for name in ("runs", "evaluations", "steps")},
        **{"a": a, "b": b, "meanings": MEANINGS, "retired": expired_rows_of_runs(reader, a, b)},
        "summary": sentences(comparison),
        "parts_at": comparison["parting"] and comparison["parting"]["step"],
        "config": sorted(comparison["config"], key=lambda setting: not setting["in_keys"]),
        "ledger": _ledger(comparison["pieces"], a, b),
        "totals": figures_of(comparison["together"]),
        "detail": _step(reader, comparison, a, b, request.number("step", 0)) if request.text("step") else None,
        "example": _example(reader, a, b, request) if example_id else None,
    }
    return Page("compare.html", f"{a} and {b}", values, [(a, addresses.run(a))], any_going(reader, a, b))


def _ledger(pieces: Sequence[Mapping[str, Any]], a: str, b: str) -> Values:
    """Return both ledgers as one picture: a cell for each result, steps across, stages down.

    An evaluation is in the column of the version that it scored.
    """
    columns = {step: column for column, step in enumerate(sorted({piece["step"] for piece in pieces}))}
    stages = [stage for stage in COMPARED if stage in {piece["stage"] for piece in pieces}]
    counts, cells = Counter(piece["state"] for piece in pieces), []
    for piece in pieces:
        step, stage, state = piece["step"], piece["stage"], piece["state"]
        evaluated = addresses.evaluation(b if state == ONLY_B else a, step)
        cells.append(
            {
                **{"row": stages.index(stage), "column": columns[step], "span": 1, "class": CLASSES[state]},
                "title": f"{'policy' if stage == EVALUATION else 'step'} {step}, {stage}: {state}",
                "address": evaluated if stage == EVALUATION else addresses.compare(a, b, step=step),
            }
        )
    legend = [{"state": state, "class": name, "count": counts[state]} for state, name in CLASSES.items()]
    return {"steps": [*columns], "stages": stages, "cells": cells, "legend": legend}


def _step(reader: StoreReader, comparison: Mapping[str, Any], a: str, b: str, step: int) -> Values:
    """Return a step of two runs: stages, figures and groups, and the verdicts and advantages that differ most."""
    traces, groups = compared_traces(reader, a, b, step), compared_groups(reader, a, b, step)
    pieces = [piece for piece in comparison["pieces"] if piece["step"] == step]
    row: Values = next((row for row in comparison["steps"] if row["step"] == step), {"a": {}, "b": {}})
    return {
        "step": step,
        "pieces": [{**piece, "class": CLASSES[piece["state"]]} for piece in pieces],
        "only": row.get("only"),
        "figures": figures_of(row),
        "num_rollouts": {side: int((traces["side"] == side).sum()) for side in ("both", "a", "b")},
        "groups": groups.head(MAX_GROUPS).to_dicts(),
        "num_groups": groups.height,
        **step_detail(reader, a, b, step),
    }


def _example(reader: StoreReader, a: str, b: str, request: PageRequest) -> Values:
    """Return the attempts of two runs at an example, and the messages of one of each: the requested or the last one.

    `shared` are the messages that both begin with, up to the first sampled one.
    """
    environment, example_id = request.text("environment"), request.text("id")
    attempts = compared_attempts(reader, a, b, environment, example_id)
    traces: dict[str, Values | None] = {}
    said: dict[str, list[Values]] = {}
    for side in "ab":
        rows = attempts.filter(side=side)
        named = rows.filter(trace_id=request.text(f"trace_{side}"))
        row = next(iter((named if named.height else rows.tail(1)).to_dicts()), None)
        trace = row and find_trace(reader, row["run"], row["trace_id"], row["key"])
        traces[side], said[side] = row, conversation(messages(reader, trace)) if trace else []
    pairs = zip(*said.values(), strict=False)
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1] and not pair[0]["sampled"], pairs)]
    return {
        **{"environment": environment, "example_id": example_id, "attempts": attempts.to_dicts(), "shared": shared},
        "sides": [{"side": side, "trace": traces[side], "said": said[side][len(shared) :]} for side in "ab"],
    }
