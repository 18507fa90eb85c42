"""The numbers of many steps' rollouts at once, as `flows.metrics` gives those of one step: the same names and values.

There the rows of one step are gone through one by one; here those of all steps are grouped by columns. Whole numbers
and flags are summed; numbers that are not whole are summed exactly by both, so that no last digit differs.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence

import polars as pl

from flows.metrics import mean
from tasks.inference.sampling.failures import STRAGGLER

ALL = "all"
"""The scope of all environments together."""
WHOLE = ("num_turns", "num_input_tokens", "num_output_tokens", "is_truncated", "staleness")
SPANS = ("setup", "generation", "model", "scoring")
COLUMNS = (
    "key",
    "trace_id",
    "environment",
    "agent",
    "trainable",
    "reward",
    "metrics",
    "num_branches",
    "error_class",
    *WHOLE,
    *(f"{span}_seconds" for span in SPANS),
)
"""What is read of traces: numbers and names, no text that a model wrote."""
OF_VERDICTS = ("key", "trace_id", "keep", "detected")
Numbers = dict[tuple[str, str], float]
"""Values by scope and measure; see `metric`."""


def metric(scope: str, measure: str) -> str:
    """Return the name of a measure in a scope as `flows.metrics` has it: `reward/all/mean`."""
    if not scope:
        return measure
    head, _, rest = measure.partition("/")
    return "/".join(filter(None, (head, scope, rest)))


def rollout_numbers(
    traces: pl.DataFrame, verdicts: pl.DataFrame, filters: Mapping[str, Sequence[str]]
) -> dict[str, Numbers]:
    """Return the numbers of steps by the value of their column `step`.

    `traces` has COLUMNS, `verdicts` OF_VERDICTS, both with `step` in place of `key`. `filters` names those configured,
    by step. A step without rows has no entry.
    """
    rows = traces.join(verdicts, on=["step", "trace_id"], how="left")
    environments = pl.col("environment")
    rows = pl.concat([rows.with_columns(scope=pl.lit(ALL)), rows.with_columns(scope=environments)])
    found: dict[str, Numbers] = {step: {} for step in traces["step"].unique()}
    stopped = pl.col("error_class").eq_missing(STRAGGLER)
    ended = rows.filter(~stopped)
    for name, scope, measure, value in (
        *_stragglers(rows.with_columns(stopped=stopped)),
        *_counts(ended),
        *_rewards(ended),
        *_spans(ended),
        *_errors(ended),
        *_agents(ended),
        *_named(ended),
        *_judged(ended),
        *_detected(ended, verdicts, filters),
    ):
        found[name][scope, measure] = value
    return found


Found = Iterator[tuple[str, str, str, float]]
_BY = ("step", "scope")


def _stragglers(rows: pl.DataFrame) -> Found:
    """Yield the share of rollouts that were stopped, where any was; and that none is left, where all were."""
    for step, scope, stopped, count in rows.group_by(_BY).agg(pl.col("stopped").sum(), n=pl.len()).iter_rows():
        if stopped:
            yield step, scope, "stragglers", stopped / count
        if stopped == count:
            yield step, scope, "rollouts", 0.0


def _counts(rows: pl.DataFrame) -> Found:
    sums = [pl.col(name).cast(pl.Int64).sum() for name in (*WHOLE, "num_branches")]
    longest = pl.col("num_output_tokens").max().alias("longest")
    for row in rows.group_by(_BY).agg(pl.len().alias("n"), *sums, longest).iter_rows(named=True):
        step, scope, count = row["step"], row["scope"], row["n"]
        yield step, scope, "rollouts", float(count)
        yield step, scope, "samples_per_rollout", row["num_branches"] / count
        yield step, scope, "longest_output", float(row["longest"])
        for name in WHOLE:
            yield step, scope, name, row[name] / count


def _rewards(rows: pl.DataFrame) -> Found:
    scored = rows.filter(pl.col("reward").is_not_null())
    for step, scope, rewards in scored.group_by(_BY).agg(pl.col("reward")).iter_rows():
        average = mean(rewards)
        yield step, scope, "reward/mean", average
        yield step, scope, "reward/std", math.sqrt(mean((reward - average) ** 2 for reward in rewards))
        yield step, scope, "reward/min", float(min(rewards))
        yield step, scope, "reward/max", float(max(rewards))


def _spans(rows: pl.DataFrame) -> Found:
    for row in rows.group_by(_BY).agg(*(pl.col(f"{span}_seconds") for span in SPANS)).iter_rows(named=True):
        for span in SPANS:
            yield row["step"], row["scope"], f"timing/{span}", mean(row[f"{span}_seconds"])


def _errors(rows: pl.DataFrame) -> Found:
    totals = rows.group_by(_BY).agg(pl.col("error_class").is_not_null().mean())
    for step, scope, share in totals.iter_rows():
        yield step, scope, "errored_rollout", share
    classes = pl.col("error_class").drop_nulls().value_counts().alias("classes")
    for step, scope, count, found in rows.group_by(_BY).agg(pl.len(), classes).iter_rows():
        for each in found:
            yield step, scope, f"errored_rollout/{each['error_class']}", each["count"] / count


def _agents(rows: pl.DataFrame) -> Found:
    """Yield the mean reward of each agent of an environment with several."""
    scored = rows.filter(pl.col("reward").is_not_null() & (pl.col("scope") != ALL))
    several = scored.filter(pl.col("agent").n_unique().over(_BY) > 1)
    for step, scope, agent, rewards in several.group_by(*_BY, "agent").agg(pl.col("reward")).iter_rows():
        yield step, scope, f"reward/{agent}/mean", mean(rewards)


def _named(rows: pl.DataFrame) -> Found:
    """Yield the means of what environments measured, which they wrote as JSON, each over the rollouts that have it."""
    own = rows.filter(pl.col("scope") != ALL).group_by(*_BY, "metrics").agg(pl.len())
    values: dict[tuple[str, str, str], list[float]] = {}
    for step, scope, text, count in own.iter_rows():
        for name, value in json.loads(text or "{}").items():
            if isinstance(value, (int, float)):
                values.setdefault((step, scope, name), []).extend([float(value)] * count)
                values.setdefault((step, ALL, name), []).extend([float(value)] * count)
    for (step, scope, name), found in values.items():
        yield step, scope, f"metrics/{name}", mean(found)


def _judged(rows: pl.DataFrame) -> Found:
    judged = rows.filter(pl.col("keep").is_not_null())
    trained = (pl.col("keep") & pl.col("trainable")).sum()
    for step, scope, count, kept, trainable in (
        judged.group_by(_BY).agg(pl.len(), kept=pl.col("keep").sum(), trainable=trained).iter_rows()
    ):
        yield step, scope, "filters/is_filtered", (count - kept) / count
        yield step, scope, "trainable/count", float(trainable)
        yield step, scope, "trainable/ratio", trainable / count


def _detected(rows: pl.DataFrame, verdicts: pl.DataFrame, filters: Mapping[str, Sequence[str]]) -> Found:
    """Yield the share that each filter found, zero for those that were asked and found nothing."""
    judged = rows.filter(pl.col("keep").is_not_null()).with_columns(pl.col("detected").list.unique())
    counts = {(step, scope): count for step, scope, count in judged.group_by(_BY).len().iter_rows()}
    hits = judged.explode("detected").drop_nulls("detected").group_by(*_BY, "detected").len()
    found = {(step, scope, name): count for step, scope, name, count in hits.iter_rows()}
    names = {step: set(given) for step, given in filters.items()}
    detected = verdicts.explode("detected").drop_nulls("detected").select("step", "detected").unique()
    for step, name in detected.iter_rows():
        names.setdefault(step, set()).add(name)
    for (step, scope), count in counts.items():
        for name in names.get(step, ()):
            yield step, scope, f"filters/{name}", found.get((step, scope, name), 0) / count
