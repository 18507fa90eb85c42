"""Pages of two runs: where they differ and their figures, one step of both, and the attempts of both at one example."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import polars as pl

from flows.queries.compare import DIFFERENT, FIGURES, ONLY_A, ONLY_B, SAME, by_step, compare, figures_of
from flows.queries.compare_rows import compared_attempts, compared_groups, compared_traces, step_detail
from flows.queries.compare_summary import sentences
from flows.queries.messages import messages
from flows.queries.reader import conversation
from flows.queries.request import BadQuestion, NotThere, PageRequest
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader, expired_rows_of_runs
from flows.queries.trace import find_trace
from flows.viewer import addresses
from flows.viewer.addresses import Page
from flows.viewer.pages.example import named_example
from flows.viewer.pages.step import neighbours
from tasks.metrics.figures import MEANINGS
from tasks.stages import COMPARED

LONG_CONFIG = 8
"""Settings that differ beyond which they are folded."""
MAX_GROUPS = 200
"""Groups of a step that are listed."""
STATES = (SAME, DIFFERENT, ONLY_A, ONLY_B)
Attempt = Mapping[str, Any]


def compare_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return the comparison of two runs; `figure` is the second figure of each step."""
    a, b = request.path["a"], request.path["b"]
    comparison = compare(reader, a, b)
    values = {
        **comparison,
        "summary": sentences(comparison),
        "parts_at": comparison["parting"] and comparison["parting"]["step"],
        "config": sorted(comparison["config"], key=lambda setting: not setting["in_keys"]),
        "long_config": len(comparison["config"]) > LONG_CONFIG,
        "picture": _ledgers(comparison["pieces"]),
        "meanings": MEANINGS,
        "figure": request.one_of("figure", FIGURES, "num_kept"),
        "figures": list(FIGURES),
        "totals": figures_of(comparison["together"]),
    }
    return _page(reader, request, "compare.html", f"{a} and {b}", values)


def _page(reader: StoreReader, request: PageRequest, template: str, title: str, values: Mapping[str, Any]) -> Page:
    a, b = request.path["a"], request.path["b"]
    crumbs = [(a, addresses.run(a))]
    if template != "compare.html":
        crumbs.append((f"{a} and {b}", addresses.compare(a, b)))
    values = {**values, "a": a, "b": b, "retired": expired_rows_of_runs(reader, a, b)}
    return Page(template, title, values, crumbs, any_going(reader, a, b))


def compare_choice_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return the comparison of run `a` with run `b`. Raises BadQuestion where one of them is not named."""
    a, b = request.text("a"), request.text("b")
    if not (a and b):
        raise BadQuestion("choose two runs to compare: one in the column A, another in the column B")
    return compare_page(reader, PageRequest(addresses.compare(a, b), {"a": a, "b": b}))


def _ledgers(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ledgers of both runs as rows of states: `steps` across, stages down, None where neither has a result.

    An evaluation is in the column of the version that it scored.
    """
    steps = sorted({piece["step"] for piece in pieces})
    states = {(piece["stage"], piece["step"]): piece["state"] for piece in pieces}
    stages, counts = {stage for stage, _ in states}, Counter(piece["state"] for piece in pieces)
    return {
        "steps": steps,
        "rows": [
            {"stage": stage, "states": [states.get((stage, step)) for step in steps]}
            for stage in COMPARED
            if stage in stages
        ],
        "counts": {state: counts[state] for state in STATES},
    }


def compare_step_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return a step of two runs: its stages, figures and groups, and the verdicts and advantages that differ most."""
    a, b, step = request.path["a"], request.path["b"], request.required_number("step")
    traces, comparison = compared_traces(reader, a, b, step), compare(reader, a, b)
    rows, groups = {row["step"]: row for row in comparison["steps"]}, compared_groups(reader, a, b, step)
    pieces = [piece for piece in comparison["pieces"] if piece["step"] == step]
    values = {
        "step": step,
        "in_run": {side: bool(traces[f"key_{side}"].count()) for side in "ab"},
        "work": by_step(pieces).get(step, {"pieces": [], "only": None, "first_difference": None}),
        **neighbours([*rows], step),
        "figures": figures_of(rows[step]),
        "meanings": MEANINGS,
        "weights_equal": rows[step]["weights_equal"],
        "agents": traces["agent"].n_unique(),
        "rollouts": {side: int((traces["side"] == side).sum()) for side in ("both", "a", "b")},
        "groups": groups.head(MAX_GROUPS).to_dicts(),
        "num_groups": groups.height,
        "detail": step_detail(reader, a, b, step),
        "keys": {row.pop("trace_id"): row for row in traces.select("trace_id", "key_a", "key_b").to_dicts()},
    }
    return _page(reader, request, "compare_step.html", f"step {step}", values)


def compare_example_page(reader: StoreReader, request: PageRequest) -> Page:
    """Return the attempts of two runs at an example, and one conversation of each.

    `step_a` or `version_a` (an evaluation) choose when, `trace_a` which attempt; the same for b. `agent` chooses whose
    attempts. Raises BadQuestion and NotThere.
    """
    a, b, (environment, example_id) = request.path["a"], request.path["b"], named_example(request)
    attempts = compared_attempts(reader, a, b, environment, example_id)
    agents = attempts["agent"].unique().sort().to_list()
    agent = request.one_of("agent", agents, agents[0])
    sides = {side: _attempts(request, side, attempts.filter(agent=agent, side=side), a == b) for side in "ab"}
    chosen = _choose_attempts(request, {side: values["attempts"] for side, values in sides.items()})
    values = {
        **{"environment": environment, "example_id": example_id, "agents": agents, "agent": agent},
        **{f"of_{side}": {**values, "attempts": values["attempts"].to_dicts()} for side, values in sides.items()},
        **{f"chosen_{side}": attempt for side, attempt in chosen.items()},
        **_conversations(reader, chosen),
    }
    return _page(reader, request, "compare_example.html", f"{environment} {example_id}", values)


def _attempts(request: PageRequest, side: str, attempts: pl.DataFrame, one_run: bool) -> dict[str, Any]:
    """Return when a run tried the example (`moments`), which moment is `shown`, and the attempts of that moment."""
    moments = attempts.group_by("step", "for_training", maintain_order=True)
    when = moments.agg(num_attempts=pl.len().cast(pl.Int64), reward=pl.col("reward").mean()).to_dicts()
    step, version = (request.text(f"{name}_{side}") for name in ("step", "version"))
    if step and version:
        raise BadQuestion(f"step_{side} and version_{side} choose different things: leave one out")
    shown: dict[str, Any] | None = None
    if step or version:
        number = request.number(f"step_{side}" if step else f"version_{side}", 0)
        shown = {"step": number, "for_training": bool(step)}
    elif when:
        # Of one run the first and the last attempts are compared; training comes before evaluations.
        training = [moment for moment in when if moment["for_training"]] or when
        shown = training[0 if one_run and side == "a" else -1]
    chosen = attempts.filter(step=shown["step"], for_training=shown["for_training"]) if shown else attempts
    return {"moments": when, "shown": shown, "attempts": chosen, "reward": chosen["reward"].mean()}


def _choose_attempts(request: PageRequest, sides: Mapping[str, pl.DataFrame]) -> dict[str, Attempt | None]:
    """Return one attempt of each side: the requested one, else the rollout that both have, else the first."""
    chosen: dict[str, Attempt | None] = {}
    for side, attempts in sides.items():
        trace_id, first = request.text(f"trace_{side}"), chosen.get("a")
        if trace_id and attempts.filter(trace_id=trace_id).is_empty():
            raise NotThere(f"trace_{side}={trace_id[:80]!r} is none of the attempts of {side} that are shown")
        same = attempts.filter(trace_id=trace_id or (first["trace_id"] if first else ""))
        chosen[side] = next((same if same.height else attempts).iter_rows(named=True), None)
    return chosen


def _conversations(reader: StoreReader, chosen: Mapping[str, Attempt | None]) -> dict[str, Any]:
    """Return what both attempts said: messages that both begin with once (`shared`), then those of each (`said_X`)."""
    said = {}
    for side, attempt in chosen.items():
        trace = attempt and find_trace(reader, attempt["run"], attempt["trace_id"], attempt["key"])
        said[side] = conversation(messages(reader, trace)) if trace else []
    pairs = zip(*said.values(), strict=False)
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1] and not pair[0]["sampled"], pairs)]
    return {"shared": shared} | {f"said_{side}": rows[len(shared) :] for side, rows in said.items()}
