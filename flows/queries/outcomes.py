"""Outcomes: the outcome of every rollout that a run uses, and of its tokens and seconds; and why, of a single one.

`tasks.metrics.accounting` has the rule, and by it checks the account of one step before training, from the rows that
its stages hold. Here the whole store is looked at, finished or not: what is not decided yet is pending.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from flows.queries.row_lineage import identify, policy_names, policy_version
from flows.queries.step_history import StepHistory, StepLineage, present
from storage.read.frames import Frames
from storage.read.lineage import Work
from tasks.inference.trace_rows.failures import GIVEN_UP
from tasks.metrics.accounting import EVALUATED, NO_WEIGHT, PENDING, REFUSED, TRAINED, outcome_of

EXPIRED = "expired"
"""Not known any more, as the rows that would say it were dropped for their age (storage.records)."""
OUTCOMES = {
    "run": pl.String,
    "step": pl.Int64,
    "environment": pl.String,
    "trace_id": pl.String,
    "outcome": pl.String,
    "detail": pl.String,
    "stale": pl.Boolean,
    "num_tokens": pl.Int64,
    "num_sampled_tokens": pl.Int64,
    "seconds": pl.Float64,
    "key": pl.String,
}
"""One row for each rollout that a run uses; `key` is the work that made the trace, `stale` whether an older policy than
the step's sampled it, `seconds` its wall-clock of set-up, generation and scoring."""


def outcomes(frames: Frames) -> pl.LazyFrame:
    """Return one row for each rollout that a run uses, of all runs of `frames`; columns as in `OUTCOMES`."""
    found = [each for run in frames.run_names for each in StepHistory(frames.graph, run).lineages]
    return outcomes_of(frames, found).lazy()


def accounting(frames: Frames) -> pl.LazyFrame:
    """Return outcomes of rollouts, tokens and seconds, by run, step, environment, outcome and detail."""
    return (
        outcomes(frames)
        .group_by("run", "step", "environment", "outcome", "detail")
        .agg(
            num_traces=pl.len().cast(pl.Int64),
            num_stale=pl.col("stale").sum().cast(pl.Int64),
            num_tokens=pl.col("num_tokens").sum(),
            num_sampled_tokens=pl.col("num_sampled_tokens").sum(),
            seconds=pl.col("seconds").sum(),
        )
        .sort("run", "step", "environment", "outcome", "detail")
    )


def outcomes_of(frames: Frames, found: Sequence[StepLineage]) -> pl.DataFrame:
    """Return one row for each rollout of some lineages alone, as `outcomes` has it; nothing else is read."""
    rows = _lineages(frames, found).join(_traces(frames, found), on="key")
    rows = rows.join(_reasons(frames, found), on=["verdicts", "trace_id"], how="left")
    rows = rows.join(packed_rollouts(frames, found), on=["batches", "trace_id"], how="left")
    # Packing leaves out what has no weight: that is known only once there is a batch.
    waits = pl.col("for_training").not_() | pl.col("batches").is_null() | pl.col("packed").is_not_null()
    dropped = pl.col("expired") & pl.col("for_training") & pl.col("packed").is_null()
    of_others = pl.when(dropped).then(pl.lit(EXPIRED)).when(waits).then("of_packed").otherwise(pl.lit(NO_WEIGHT))
    rows = rows.with_columns(otherwise=of_others)
    # The rule is plain Python and the combinations are few, so it is asked once for each and joined; null is a value.
    given = ["error_class", "reason", "otherwise"]
    return rows.join(_apply_rule(rows.select(given).unique()), on=given, nulls_equal=True).select(*OUTCOMES)


def _apply_rule(combinations: pl.DataFrame) -> pl.DataFrame:
    """Ask the rule of the accounts, once for each combination that there is."""
    decided = [outcome_of(*each) for each in combinations.iter_rows()]
    outcome, detail = zip(*decided, strict=True) if decided else ((), ())
    columns = {"outcome": outcome, "detail": detail}
    return combinations.with_columns(pl.Series(name, values, pl.String) for name, values in columns.items())


def _lineages(frames: Frames, found: Sequence[StepLineage]) -> pl.DataFrame:
    """Return lineages as rows: their keys, and the outcome of a rollout that nothing holds back."""
    against = refusals(frames, found)
    rows = [
        {
            "run": each.run,
            "key": each.traces.key,
            "verdicts": each.verdicts and each.verdicts.key,
            "batches": each.batches and each.batches.key,
            "for_training": each.for_training,
            "expired": has_expired_rows(frames, each),
            "of_packed": outcome_of_packed(each, against),
        }
        for each in found
    ]
    text = dict.fromkeys(("run", "key", "verdicts", "batches"), pl.String)
    flags = dict.fromkeys(("for_training", "expired"), pl.Boolean)
    return pl.DataFrame(rows, schema={**text, **flags, "of_packed": pl.String})


def has_expired_rows(frames: Frames, lineage: StepLineage) -> bool:
    """Say whether rows of a lineage were dropped for their age that say the outcomes of its rollouts after sampling."""
    # What was trained was approved: then nobody needs the decision's row any more.
    decided = None if lineage.updates else lineage.decision
    made = {"verdicts": lineage.verdicts, "samples": lineage.samples, "batches": lineage.batches, "decisions": decided}
    pieces = [piece for table, work in made.items() if work for piece in work.slices_of(table)]
    return bool(frames.store.slices.expired_slices.find(pieces))


def outcome_of_packed(lineage: StepLineage, against: Collection[str]) -> str:
    """Return the outcome of packed rollouts of a lineage; `against` are decisions, by key, that refused a batch."""
    if not lineage.for_training:
        return EVALUATED
    if lineage.updates:
        return TRAINED
    return REFUSED if lineage.decision and lineage.decision.key in against else PENDING


def refusals(frames: Frames, found: Sequence[StepLineage]) -> set[str]:
    """Return the decisions that were against a batch of some lineages, by key."""
    decisions = frames.rows(present(*(each.decision for each in found)), "decisions")
    return set(decisions.filter(~pl.col("approved")).select("key").collect()["key"])


def _traces(frames: Frames, found: Sequence[StepLineage]) -> pl.DataFrame:
    spans = (pl.col(f"{name}_seconds") for name in ("setup", "generation", "scoring"))
    return (
        frames.rows(present(*(each.traces for each in found)), "traces")
        .select(
            "key",
            "step",
            "environment",
            "trace_id",
            "error_class",
            stale=pl.col("staleness") > 0,
            num_tokens=pl.col("num_input_tokens") + pl.col("num_output_tokens"),
            num_sampled_tokens=pl.col("num_output_tokens"),
            seconds=pl.sum_horizontal(*spans),
        )
        .collect()
    )


def _reasons(frames: Frames, found: Sequence[StepLineage]) -> pl.DataFrame:
    verdicts = frames.rows(present(*(each.verdicts for each in found)), "verdicts")
    return verdicts.select(pl.col("key").alias("verdicts"), "trace_id", "reason").collect()


def packed_rollouts(frames: Frames, found: Sequence[StepLineage]) -> pl.DataFrame:
    """Return the rollouts that have a sample in a batch, by the key of the batch."""
    pairs = [(each.samples.key, each.batches.key) for each in found if each.samples and each.batches]
    keys = pl.DataFrame(sorted(set(pairs)), schema={"samples": pl.String, "batches": pl.String}, orient="row")
    credits = frames.rows(present(*(each.samples for each in found)), "samples")
    samples = credits.select(pl.col("key").alias("samples"), "sample_id", "trace_id")
    rows = frames.rows(present(*(each.batches for each in found)), "batches")
    # Samples made again have the same ids: a batch is joined with those alone that it was packed from.
    packed = rows.select(pl.col("key").alias("batches"), pl.col("sample_ids").alias("sample_id")).explode("sample_id")
    joined = packed.join(keys.lazy(), on="batches").join(samples, on=["samples", "sample_id"])
    return joined.select("batches", "trace_id", packed=pl.lit(True)).unique().collect()


TRACE = (
    *("trace_id", "assignment_id", "environment", "example_id", "group_id", "agent", "trainable", "policy_key"),
    *("policy_version", "staleness", "reward", "num_input_tokens", "num_output_tokens", "error_class"),
    *("error_type", "error_message"),
)
"""Columns of a rollout's trace that are returned."""


SAMPLE = ("sample_id", "branch", "path", "reward", "baseline", "advantage", "num_tokens")


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
    # Only what cannot be read from the rows that are left is unknown: a packed sample proves that it was trained on.
    if lineage.for_training and not weighted and has_expired_rows(frames, lineage):
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


def packed_samples(frames: Frames, lineage: StepLineage, trace_id: str) -> pl.DataFrame:
    """Return the samples of a rollout by branch: columns of `SAMPLE`, and the `row` and `update` that each is in.

    Row and update are null where a sample was not packed: none of its tokens has a weight, or it was not yet. There
    are no rows where the rollout has no credit.
    """
    credited = frames.rows(present(lineage.samples), "samples").filter(pl.col("trace_id") == trace_id)
    own = credited.select(SAMPLE).sort("branch").collect()
    rows = frames.rows(present(lineage.batches), "batches").select("row", "update", sample_id="sample_ids")
    named = pl.col("sample_id").is_in(own["sample_id"].to_list())
    return own.join(
        rows.explode("sample_id").filter(named).collect(), on="sample_id", how="left", maintain_order="left"
    )


def _samples(frames: Frames, lineage: StepLineage, trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rollout's samples with the batch row that each is in; the row is None where it was not packed."""
    return packed_samples(frames, lineage, trace["trace_id"]).drop("branch", "path").to_dicts()


def _group(frames: Frames, work: Work, trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the rollouts of the same group earned."""
    rows = frames.rows([work], "traces").filter(pl.col("group_id") == trace["group_id"])
    rewards = rows.select("reward", "error_class").collect()
    reward = rewards["reward"].drop_nulls()
    # Stopped and stale rollouts carry an error class for a mark, but they did not fail.
    stopped = int(rewards["error_class"].is_in(sorted(GIVEN_UP)).sum())
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
