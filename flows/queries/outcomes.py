"""explain, use_of: the outcome of one rollout and what decided it; view `rollouts` has the outcomes of all."""

import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from flows.queries.row_lineage import identify, policy_names, policy_version
from flows.queries.step_history import StepHistory, StepLineage, present
from flows.queries.views import select
from storage.read.frames import Frames
from storage.read.lineage import Work
from tasks.metrics.accounting import EVALUATED

TRACE = (
    *("trace_id", "assignment_id", "environment", "example_id", "group_id", "agent", "trainable", "policy_key"),
    *("policy_version", "staleness", "reward", "num_input_tokens", "num_output_tokens", "error_class"),
    *("error_type", "error_message"),
)
"""Columns of a rollout's trace that are returned."""


SAMPLE = ("sample_id", "branch", "path", "reward", "baseline", "advantage", "num_tokens", '"row"', '"update"')


def explain(frames: Frames, text: str) -> dict[str, Any]:
    """Return the outcome of a rollout as plain values: its own, by run, and the quarantines that it is in."""
    roots = identify(frames, text, "trace").roots
    keys = {root.key for root in roots}
    trace_id = roots[0].id
    rows = frames.rows([frames.graph.works[key] for key in sorted(keys)], "traces").filter(
        pl.col("trace_id") == trace_id
    )
    traces = {row["key"]: row for row in rows.select("key", "step", *TRACE).collect().to_dicts()}
    uses = [
        use_of(frames, lineage, traces[lineage.traces.key])
        for run in frames.run_names
        for lineage in StepHistory(frames.graph, run).lineages
        if lineage.traces.key in traces
    ]
    return {"trace": traces[roots[-1].key], "runs": uses, "quarantines": quarantines_of(frames, trace_id)}


def quarantines_of(frames: Frames, trace_id: str) -> list[dict[str, Any]]:
    """Return the quarantines that a rollout is in, as plain values."""
    return [
        {name: value for name, value in vars(quarantine).items() if name != "trace_ids"}
        for quarantine in frames.store.quarantines.all()
        if trace_id in quarantine.trace_ids
    ]


def use_of(frames: Frames, lineage: StepLineage, trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one run made of the rollout, with the numbers that decided.

    `lineage` is the run's work that the rollout went through, `trace` its row with the columns `TRACE`.
    """
    trace_id, regraded = trace["trace_id"], "regrades" in lineage.traces.tables
    verdict = _row(frames, lineage.verdicts, "verdicts", trace_id)
    decision = _row(frames, lineage.decision, "decisions")
    rollout = select(frames, [lineage], "select outcome, detail from rollouts where trace_id = $id", id=trace_id)
    groups = select(frames, [lineage], "select * from group_rewards where group_id = $id", id=trace["group_id"])
    outcome, detail = rollout.row(0)
    return {
        "run": lineage.run,
        "state": frames.store.runs.events(lineage.run)[-1].event,
        "step": lineage.traces.step,
        "outcome": outcome,
        "detail": detail,
        "reward": trace["reward"],
        "verdict": verdict and {**verdict, "evidence": json.loads(verdict["evidence"])},
        "group": groups.drop("run", "key").row(0, named=True),
        "samples": _samples(frames, lineage, trace_id),
        "decision": decision and {**decision, "figures": json.loads(decision["figures"])},
        "regrade": _row(frames, lineage.traces if regraded else None, "regrades", trace_id),
        "policy": f"{lineage.run}:{policy_version(lineage.updates)}" if lineage.updates else None,
        "scored": _policy(frames, trace["policy_key"]) if outcome == EVALUATED else None,
        "keys": _keys(lineage),
    }


def _policy(frames: Frames, key: str) -> str:
    work = frames.graph.works.get(key)
    return policy_names(work)[0] if work else key


def _keys(lineage: StepLineage) -> dict[str, str]:
    return {work.stage: work.key for work in lineage.works if work}


def _row(frames: Frames, work: Work | None, table: str, trace_id: str | None = None) -> dict[str, Any] | None:
    """Return the first row of a table that a work made, of one rollout if it is named; None where there is none."""
    rows = frames.rows(present(work), table)
    rows = rows if trace_id is None else rows.filter(trace_id=trace_id)
    return next(rows.drop("run", "step", "key", "attempt", "seq").collect().iter_rows(named=True), None)


def packed_samples(frames: Frames, lineage: StepLineage, trace_id: str) -> pl.DataFrame:
    """Return the samples of a rollout by branch, as view `training_samples` has them."""
    query = f"select {', '.join(SAMPLE)} from training_samples where trace_id = $id order by branch"
    return select(frames, [lineage], query, id=trace_id)


def _samples(frames: Frames, lineage: StepLineage, trace_id: str) -> list[dict[str, Any]]:
    return packed_samples(frames, lineage, trace_id).drop("branch", "path").to_dicts()
