"""Why: was a rollout trained on, by which run, in which batch; and if not, what decided against it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from flows.queries.identify import identify, policy_names, policy_version
from flows.queries.outcomes import EXPIRED, expired, outcome_of_packed
from flows.queries.step_history import StepHistory, StepLineage
from storage.read.frames import Frames
from storage.read.lineage import Work
from tasks.inference.trace_rows.failures import STRAGGLER
from tasks.metrics.accounting import EVALUATED, NO_WEIGHT, outcome_of

TRACE = (
    "trace_id",
    "assignment_id",
    "environment",
    "example_id",
    "group_id",
    "agent",
    "trainable",
    "policy_key",
    "policy_version",
    "staleness",
    "reward",
    "num_input_tokens",
    "num_output_tokens",
    "error_class",
    "error_type",
    "error_message",
)
"""What is told of a rollout."""


def explain(frames: Frames, text: str) -> dict[str, Any]:
    """Return what became of a rollout as plain values: its own, by run, and the quarantines that it is in."""
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
        {name: value for name, value in vars(each).items() if name != "trace_ids"}
        for each in frames.store.quarantines.all()
        if trace_id in each.trace_ids
    ]


def use_of(frames: Frames, lineage: StepLineage, trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one run made of the rollout, with the numbers that decided.

    `lineage` is the run's work that the rollout went through, `trace` its row with the columns `TRACE`.
    """
    verdict = next(_rows(frames, lineage.verdicts, "verdicts", trace), None)
    samples = _samples(frames, lineage, trace)
    decision = next(_rows(frames, lineage.decision, "decisions", None), None)
    refused = {lineage.decision.key} if lineage.decision and decision and not decision["approved"] else set()
    weighted = any(sample["row"] is not None for sample in samples)
    otherwise = (
        outcome_of_packed(lineage, refused)
        if not lineage.for_training or not lineage.batches or weighted
        else NO_WEIGHT
    )
    if lineage.for_training and not weighted and expired(frames, lineage):
        otherwise = EXPIRED
    outcome, detail = outcome_of(trace["error_class"], verdict["reason"] if verdict else None, otherwise)
    return {
        "run": lineage.run,
        "state": frames.store.runs.events(lineage.run)[-1].event,
        "step": lineage.traces.step,
        "outcome": outcome,
        "detail": detail,
        "reward": trace["reward"],
        "verdict": verdict and {**verdict, "evidence": json.loads(verdict["evidence"])},
        "group": _group(frames, lineage.traces, trace),
        "samples": samples,
        "decision": decision and {**decision, "figures": json.loads(decision["figures"])},
        "regrade": next(
            _rows(frames, lineage.traces if "regrades" in lineage.traces.tables else None, "regrades", trace), None
        ),
        "policy": f"{lineage.run}:{policy_version(lineage.updates)}" if lineage.updates else None,
        "earlier": [earlier for each in lineage.earlier if (earlier := _trained_before(frames, each, trace))],
        "scored": _policy(frames, trace) if otherwise == EVALUATED else None,
        "keys": _keys(lineage),
    }


def _trained_before(frames: Frames, lineage: StepLineage, trace: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return in which rows of a batch that the run trained before it was done again the rollout is; None if in none."""
    samples = [sample for sample in _samples(frames, lineage, trace) if sample["row"] is not None]
    return {"samples": samples, "keys": _keys(lineage)} if samples else None


def _policy(frames: Frames, trace: Mapping[str, Any]) -> str:
    work = frames.graph.works.get(trace["policy_key"])
    return policy_names(work)[0] if work else trace["policy_key"]


def _keys(lineage: StepLineage) -> dict[str, str]:
    works = (lineage.traces, lineage.verdicts, lineage.samples, lineage.batches, lineage.decision, lineage.updates)
    return {work.stage: work.key for work in works if work}


def _rows(frames: Frames, work: Work | None, table: str, trace: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table that a work made, all of them or those of one rollout; none where there is no work."""
    if work is None:
        return
    rows = frames.rows([work], table)
    if trace is not None:
        rows = rows.filter(pl.col("trace_id") == trace["trace_id"])
    yield from rows.drop("run", "step", "key", "attempt", "seq").collect().to_dicts()


def _samples(frames: Frames, lineage: StepLineage, trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rollout's samples with the batch row that each is in; the row is None where it was not packed."""
    if lineage.samples is None:
        return []
    numbers = ("sample_id", "reward", "baseline", "advantage", "num_tokens")
    own = frames.rows([lineage.samples], "samples").filter(pl.col("trace_id") == trace["trace_id"])
    packed = frames.rows([lineage.batches] if lineage.batches else [], "batches")
    rows = packed.select("row", "update", pl.col("sample_ids").alias("sample_id")).explode("sample_id")
    return (
        own.sort("seq")
        .select(numbers)
        .join(rows, on="sample_id", how="left", maintain_order="left")
        .collect()
        .to_dicts()
    )


def _group(frames: Frames, work: Work, trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the rollouts of the same group earned."""
    rows = frames.rows([work], "traces").filter(pl.col("group_id") == trace["group_id"])
    rewards = rows.select("reward", "error_class").collect()
    reward = rewards["reward"].drop_nulls()
    stopped = int((rewards["error_class"] == STRAGGLER).sum())
    return {
        "group_id": trace["group_id"],
        "num_rollouts": len(rewards),
        "num_rewarded": len(reward),
        "num_errored": len(rewards) - rewards["error_class"].null_count() - stopped,
        "num_stopped": stopped,
        "lowest": reward.min(),
        "mean": reward.mean(),
        "highest": reward.max(),
    }
