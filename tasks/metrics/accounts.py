"""Metrics of what became of a step's rollouts, and of the groups that they were drawn in."""

from collections import Counter

import pyarrow as pa

from tasks.arrays.columns import texts
from tasks.arrays.group_counts import admitted_groups
from tasks.metrics.accounting import NO_WEIGHT, PENDING, REFUSED, TRAINED, account, outcome_of, packed_traces
from tasks.runtime.stage import Tables

CHECKED = ("assignments", "traces", "verdicts", "samples", "batches")
"""The tables that account for every rollout of a step together."""


def account_metrics(tables: Tables) -> dict[str, float]:
    """Return how many rollouts met which outcome: `accounting/trained`, `accounting/filtered/zero_advantage`.

    Of a step that was not trained, what nothing held back is pending, or refused where a gate said no. An outcome that
    no rollout met has no entry. Raises AccountBreach where the step was packed and a rollout is lost or counted twice.
    """
    outcome = _outcome(tables)
    counts: Counter[tuple[str, str]] = Counter()
    if all(name in tables for name in CHECKED):
        for share in account(*(tables[name] for name in CHECKED)):
            counts[outcome if share.outcome == TRAINED else share.outcome, share.detail] += share.num_traces
    else:
        counts = _unchecked(tables, outcome)
    return {"/".join(filter(None, ("accounting", *outcome))): float(count) for outcome, count in sorted(counts.items())}


def group_metrics(wanted: int, num_batches: int, assignments: pa.Table, credits: pa.Table) -> dict[str, float]:
    """Return how many groups a step wanted, drew and has something to train on of, and in how many batches."""
    counts = {
        "wanted": wanted,
        "drawn": len(set(texts(assignments["group_id"]))),
        "admitted": len(admitted_groups(credits)),
    }
    return {f"groups/{name}": float(count) for name, count in (counts | {"batches": num_batches}).items()}


def _outcome(tables: Tables) -> str:
    """Return the outcome of a rollout that was packed."""
    if "updates" in tables:
        return TRAINED
    refused = "decisions" in tables and not all(tables["decisions"]["approved"].to_pylist())
    return REFUSED if refused else PENDING


def _unchecked(tables: Tables, outcome: str) -> Counter[tuple[str, str]]:
    """Count the outcomes of rollouts of which not everything is there."""
    judged = tables.get("verdicts")
    reasons = dict(zip(texts(judged["trace_id"]), judged["reason"].to_pylist(), strict=True)) if judged else {}
    packed = packed_traces(tables["samples"], tables["batches"]) if {"samples", "batches"} <= tables.keys() else None
    rows = tables["traces"].select(["trace_id", "error_class"]).to_pylist()
    return Counter(
        outcome_of(
            row["error_class"],
            reasons.get(row["trace_id"]),
            outcome if packed is None or row["trace_id"] in packed else NO_WEIGHT,
        )
        for row in rows
    )
