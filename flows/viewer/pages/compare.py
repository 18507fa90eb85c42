"""compare_page: two runs, with a part for one step of both."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flows.queries.compare import DIFFERENT, ONLY_A, ONLY_B, SAME, ComparedStep, compare
from flows.queries.request import BadQuestion, PageRequest
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader, expired_rows_of_runs
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

    `step` adds the part of a step.
    """
    a, b = request.text("a"), request.text("b")
    if not (a and b):
        raise BadQuestion("choose two runs to compare: one in the column A, another in the column B")
    comparison = compare(reader, a, b)
    values = {
        **{
            name: comparison[name]
            for name in ("runs", "parting", "same_work", "results", "evaluations", "steps", "totals")
        },
        **{"a": a, "b": b, "meanings": MEANINGS, "retired": expired_rows_of_runs(reader, a, b)},
        "config": sorted(comparison["config"], key=lambda setting: not setting["in_keys"]),
        "ledger": _ledger(comparison["pieces"], a, b),
        "detail": _step(reader, comparison, a, b, request.number("step", 0)) if request.text("step") else None,
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
    rows = ComparedStep(reader, a, b, step)
    pieces = [piece for piece in comparison["pieces"] if piece["step"] == step]
    return {
        "step": step,
        "pieces": [{**piece, "class": CLASSES[piece["state"]]} for piece in pieces],
        "only": next((row["only"] for row in comparison["steps"] if row["step"] == step), None),
        "figures": [row for row in comparison["figures"] if row["step"] == step],
        "num_rollouts": {side: int((rows.traces["side"] == side).sum()) for side in ("both", "a", "b")},
        "groups": rows.groups.head(MAX_GROUPS).to_dicts(),
        "num_groups": rows.groups.height,
        **rows.detail(),
    }
