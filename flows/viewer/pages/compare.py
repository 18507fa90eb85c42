"""Pages of two runs: where they differ and their figures, one step of both, and the attempts of both at one example."""

from collections import Counter
from collections.abc import Mapping, Sequence
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
from flows.viewer.addresses import Crumb, Page
from tasks.metrics.figures import MEANINGS
from tasks.stages import COMPARED

LONG_CONFIG = 8
"""Settings that differ beyond which they are folded."""
MAX_GROUPS = 200
"""Groups of a step that are listed."""
Attempt = Mapping[str, Any]


def compare_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return the comparison of two runs; `figure` is the second figure of each step."""
    a, b = asked.path["a"], asked.path["b"]
    comparison = compare(library, a, b)
    values = {
        **comparison,
        **_sides(library, asked),
        "summary": sentences(comparison),
        "parts_at": comparison["parting"] and comparison["parting"]["step"],
        "config": sorted(comparison["config"], key=lambda setting: not setting["in_keys"]),
        "long_config": len(comparison["config"]) > LONG_CONFIG,
        "picture": ledger_cells(comparison["pieces"]),
        "meanings": MEANINGS,
        "figure": asked.one_of("figure", FIGURES, "num_kept"),
        "figures": list(FIGURES),
        "totals": figures_of(comparison["together"]),
    }
    return Page("compare.html", f"{a} and {b}", values, (Crumb(a, addresses.run(a)),), any_going(library, a, b))


def _sides(library: StoreReader, asked: PageRequest) -> dict[str, Any]:
    a, b = asked.path["a"], asked.path["b"]
    return {"a": a, "b": b, "retired": expired_rows_of_runs(library, a, b)}


def _crumbs(a: str, b: str) -> tuple[Crumb, ...]:
    return Crumb(a, addresses.run(a)), Crumb(f"{a} and {b}", addresses.compare(a, b))


def compare_choice_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return the comparison of run `a` with run `b`. Raises BadQuestion where one of them is not named."""
    a, b = asked.text("a"), asked.text("b")
    if not (a and b):
        raise BadQuestion("choose two runs to compare: one in the column A, another in the column B")
    return compare_page(library, PageRequest(addresses.compare(a, b), {"a": a, "b": b}))


def ledger_cells(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ledgers of both runs as rows of states: `steps` across, stages down, None where neither has a result.

    An evaluation is in the column of the version that it scored.
    """
    steps = sorted({piece["step"] for piece in pieces})
    states = {(piece["stage"], piece["step"]): piece["state"] for piece in pieces}
    stages = [stage for stage in COMPARED if any(piece["stage"] == stage for piece in pieces)]
    rows = [{"stage": stage, "states": [states.get((stage, step)) for step in steps]} for stage in stages]
    counts = Counter(piece["state"] for piece in pieces)
    return {"steps": steps, "rows": rows, "counts": {s: counts[s] for s in (SAME, DIFFERENT, ONLY_A, ONLY_B)}}


def compare_step_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return a step of two runs: its stages, figures and groups, and the verdicts and advantages that differ most."""
    a, b, step = asked.path["a"], asked.path["b"], asked.required_number("step")
    traces, comparison = compared_traces(library, a, b, step), compare(library, a, b)
    steps = {row["step"]: row for row in comparison["steps"]}
    row, known = steps[step], list(steps)
    groups = compared_groups(library, a, b, step)
    index = known.index(step)
    no_work: dict[str, Any] = {"pieces": [], "only": None, "first_difference": None}
    values = {
        **_sides(library, asked),
        "step": step,
        "in_run": {side: bool(traces[f"key_{side}"].count()) for side in "ab"},
        "work": by_step(piece for piece in comparison["pieces"] if piece["step"] == step).get(step, no_work),
        "previous": known[index - 1] if index else None,
        "next": known[index + 1] if index + 1 < len(known) else None,
        "figures": figures_of(row),
        "meanings": MEANINGS,
        "weights_equal": row["weights_equal"],
        "agents": traces["agent"].n_unique(),
        "rollouts": {side: int((traces["side"] == side).sum()) for side in ("both", "a", "b")},
        "groups": groups.head(MAX_GROUPS).to_dicts(),
        "num_groups": groups.height,
        "detail": step_detail(library, a, b, step),
        "keys": {row.pop("trace_id"): row for row in traces.select("trace_id", "key_a", "key_b").to_dicts()},
    }
    return Page("compare_step.html", f"step {step}", values, _crumbs(a, b), any_going(library, a, b))


def compare_example_page(library: StoreReader, asked: PageRequest) -> Page:
    """Return the attempts of two runs at an example, and one conversation of each.

    `step_a` or `version_a` (an evaluation) choose when, `trace_a` which attempt; the same for b. `agent` chooses whose
    attempts. Raises BadQuestion and NotThere.
    """
    a, b = asked.path["a"], asked.path["b"]
    environment, example_id = asked.text("environment"), asked.text("id")
    if not (environment and example_id):
        raise BadQuestion("an example is named by its environment and its id: ?environment=...&id=...")
    attempts = compared_attempts(library, a, b, environment, example_id)
    agents = attempts["agent"].unique().sort().to_list()
    agent = asked.one_of("agent", agents, agents[0])
    sides = {side: _attempts_of_side(asked, side, attempts.filter(agent=agent, side=side), a == b) for side in "ab"}
    chosen = _choose_attempts(asked, sides)
    values = {
        **_sides(library, asked),
        **{"environment": environment, "example_id": example_id, "agents": agents, "agent": agent},
        **{f"of_{side}": {**values, "attempts": values["attempts"].to_dicts()} for side, values in sides.items()},
        **{f"chosen_{side}": attempt for side, attempt in chosen.items()},
        **_conversations(library, chosen),
    }
    return Page("compare_example.html", f"{environment} {example_id}", values, _crumbs(a, b), any_going(library, a, b))


def _attempts_of_side(asked: PageRequest, side: str, attempts: pl.DataFrame, one_run: bool) -> dict[str, Any]:
    """Return when a run tried the example (`moments`), which moment is `shown`, and the attempts of that moment."""
    moments = attempts.group_by("step", "for_training", maintain_order=True)
    when = moments.agg(num_attempts=pl.len().cast(pl.Int64), reward=pl.col("reward").mean()).to_dicts()
    step, version = (asked.text(f"{name}_{side}") for name in ("step", "version"))
    if step and version:
        raise BadQuestion(f"step_{side} and version_{side} choose different things: leave one out")
    shown: dict[str, Any] | None = None
    if step or version:
        number = asked.number(f"step_{side}" if step else f"version_{side}", 0)
        shown = {"step": number, "for_training": bool(step)}
    elif when:
        # Of one run the first and the last attempts are compared; training comes before evaluations.
        training = [moment for moment in when if moment["for_training"]] or when
        shown = training[0 if one_run and side == "a" else -1]
    chosen = attempts.filter(step=shown["step"], for_training=shown["for_training"]) if shown else attempts
    return {"moments": when, "shown": shown, "attempts": chosen, "reward": chosen["reward"].mean()}


def _choose_attempts(asked: PageRequest, sides: Mapping[str, Mapping[str, Any]]) -> dict[str, Attempt | None]:
    """Return one attempt of each side: the requested one, else the rollout that both have, else the first."""
    chosen: dict[str, Attempt | None] = {}
    for side, values in sides.items():
        attempts: pl.DataFrame = values["attempts"]
        trace_id = asked.text(f"trace_{side}")
        if trace_id and attempts.filter(trace_id=trace_id).is_empty():
            raise NotThere(f"trace_{side}={trace_id[:80]!r} is none of the attempts of {side} that are shown")
        first = chosen.get("a")
        shared = first["trace_id"] if first else ""
        same = attempts.filter(trace_id=trace_id or shared)
        rows = same if same.height else attempts
        chosen[side] = rows.row(0, named=True) if rows.height else None
    return chosen


def _conversations(library: StoreReader, chosen: Mapping[str, Attempt | None]) -> dict[str, Any]:
    """Return what both attempts said: messages that both begin with once (`shared`), then those of each (`said_X`)."""
    said = {}
    for side, attempt in chosen.items():
        found = attempt and find_trace(library, attempt["run"], attempt["trace_id"], attempt["key"])
        said[side] = conversation(messages(library, found)) if found else []
    num_shared = 0
    for one, other in zip(*said.values(), strict=False):
        if one != other or one["sampled"]:
            break
        num_shared += 1
    return {"shared": said["a"][:num_shared]} | {f"said_{side}": rows[num_shared:] for side, rows in said.items()}
