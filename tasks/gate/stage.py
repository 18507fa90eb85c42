"""The gate: whether a step's batch goes on to training, by a rule or by a person; the decision is a row.

Reads traces, messages, verdicts, samples, batches; writes decisions.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.schemas.stage_tables import DECISIONS
from tasks.gate.rules import described, holds
from tasks.metrics.figures import Figures, batch_figures
from tasks.runtime.prefect_task import as_task
from tasks.runtime.stage import Stage, Tables


@dataclass(frozen=True)
class Shown:
    """A rollout that a person is shown."""

    label: str
    """best, median or worst by reward."""
    trace_id: str
    reward: float
    messages: tuple[tuple[str, str], ...]
    """Role and text, in the order of the trace."""


@dataclass(frozen=True)
class Question:
    """What a person is asked to approve."""

    step: int
    key: str
    """The key of the decision: the same question has the same key."""
    figures: Figures
    rollouts: tuple[Shown, ...]
    timeout_seconds: float


@dataclass(frozen=True)
class Answer:
    """What a person said."""

    approved: bool
    by: str
    reason: str


Approve = Callable[[Question], Answer]
"""Asks a person and waits; raises where nobody answers in time or the run is cancelled."""


def gate(tables: Tables, config: View, *, step: int, key: str, approve: Approve) -> Tables:
    """Return the one row that says whether the batch goes on. Raises what `approve` raises, and RuleFailed."""
    asked_at = datetime.now(UTC)
    figures = batch_figures(tables, config.packing.tokens_per_row)
    rule = config.gate.rule if config.gate.type == "rule" else None
    if rule is not None:
        answer = by_rule(rule, figures)
    else:
        shown = shown_rollouts(tables["traces"], tables["messages"])
        answer = approve(Question(step, key, figures, shown, config.gate.timeout_seconds))
    row = {
        "gate": config.gate.type,
        "approved": answer.approved,
        "rule": rule,
        "decided_by": answer.by,
        "reason": answer.reason,
        "figures": json.dumps(figures),
        "asked_at": asked_at,
        "decided_at": datetime.now(UTC),
    }
    return {"decisions": pa.Table.from_pylist([row], schema=DECISIONS.arrow)}


def by_rule(rule: str, figures: Figures) -> Answer:
    """Return what a rule says of a batch, with the figures that it names."""
    approved = holds(rule, figures)
    return Answer(approved, "rule", f"{rule} {'holds' if approved else 'does not hold'}: {described(rule, figures)}")


def shown_rollouts(traces: pa.Table, messages: pa.Table) -> tuple[Shown, ...]:
    """Return the best, the median and the worst rollout by reward with their texts; fewer where fewer were scored.

    Those of seats that are not the policy's are not asked about.
    """
    chosen_from = pc.and_(pc.is_valid(traces["reward"]), traces["trainable"])
    scored = traces.select(["trace_id", "reward"]).filter(chosen_from).to_pylist()
    ranked = sorted(scored, key=lambda row: (row["reward"], row["trace_id"]))
    if not ranked:
        return ()
    places = {0: "worst", len(ranked) // 2: "median", len(ranked) - 1: "best"}  # of one rollout, the last of these
    chosen = [(label, ranked[place]) for place, label in sorted(places.items(), reverse=True)]
    return tuple(
        Shown(label, row["trace_id"], row["reward"], _texts(messages, row["trace_id"])) for label, row in chosen
    )


def _texts(messages: pa.Table, trace_id: str) -> tuple[tuple[str, str], ...]:
    own = messages.select(["trace_id", "message", "role", "content"])
    rows = own.filter(pc.equal(own["trace_id"], trace_id)).sort_by("message").to_pylist()
    return tuple((row["role"], row["content"] or "") for row in rows)


STAGE = Stage(
    name="gate",
    version=1,
    reads=("traces", "messages", "verdicts", "samples", "batches"),
    writes=("decisions",),
    sections=("gate", "packing"),
    function=gate,
)
task = as_task(STAGE)
