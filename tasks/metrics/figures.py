"""Figures: what a step's tables come to in a few numbers, for gates and comparisons, and the names of metrics.

Every figure has one name everywhere; that of a metric is a measure in a scope. A figure that has nothing to be made of
is None, which is not zero: the mean reward of traces that were not scored, the fill of no rows.
"""

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from tasks.inference.trace_rows.failures import GIVEN_UP, UNSCORED

_log = logging.getLogger("stagecoach")

ALL = "all"
"""The scope of all environments together."""
Values = dict[tuple[str, str], float]
"""Values by scope (an environment, `all`, or empty) and measure (`reward/mean`)."""
NOT_FAILED = (None, *sorted(GIVEN_UP | {UNSCORED}))
"""Error classes of rollouts that did not fail: none, those of what was not waited for, and of what has no score."""
Figures = Mapping[str, int | float | None]

TRACE_COLUMNS = ["trace_id", "group_id", "trainable", "reward", "is_truncated", "num_output_tokens", "error_class"]
VERDICT_COLUMNS = ["trace_id", "keep", "reason"]
CREDIT_COLUMNS = ["sample_id", "group_id", "advantage"]
BATCH_COLUMNS = ["sample_ids", "cu_seqlens"]
FIGURE_COLUMNS = {
    "traces": TRACE_COLUMNS,
    "verdicts": VERDICT_COLUMNS,
    "samples": CREDIT_COLUMNS,
    "batches": BATCH_COLUMNS,
}
"""What figures read of each table."""

MEANINGS = {
    "num_traces": "rollouts, failed ones included",
    "num_groups": "examples tried",
    "reward_mean": "mean of the rewards that there are",
    "reward_std": "their standard deviation (population)",
    "reward_min": "the least of them",
    "reward_max": "the greatest of them",
    "truncated_ratio": "share of traces ended by a limit on tokens or turns",
    "errored_ratio": "share of traces that failed",
    "output_tokens_mean": "mean of the tokens sampled in a trace",
    "num_kept": "traces that the filters kept",
    "num_trainable": "kept traces whose tokens belong to the policy",
    "trainable_ratio": "num_trainable / num_traces",
    "num_samples": "training samples (branches of kept traces)",
    "advantage_mean": "mean of the samples' advantages",
    "advantage_std": "their standard deviation (population)",
    "num_packed": "samples that have a weight and are in the packed rows",
    "num_rows": "packed rows, padding rows included",
    "num_tokens": "tokens of samples in packed rows",
    "fill": "num_tokens / (num_rows x packing.tokens_per_row)",
}
"""What each figure is; a rule may name any of them."""


SCORE_MEANINGS = {
    "score_mean": "mean of a named reward, without its weight",
    "score_trend": "rank correlation of step and mean of a named reward over gate.window steps",
}
"""Figures of each named reward; their names are `score_mean/NAME`, a rule has `score_mean['NAME']`."""


def metric_values(rows: pa.Table) -> Values:
    """Return the rows of table `metrics` of one step by scope and measure."""
    columns = [rows[name].to_pylist() for name in ("scope", "name", "value")]
    return {(scope, name): value for scope, name, value in zip(*columns, strict=True)}


def full_name(scope: str, measure: str) -> str:
    """Return the name of a measure in a scope: `reward/mean` of `all` is `reward/all/mean`."""
    if not scope:
        return measure
    head, _, rest = measure.partition("/")
    return "/".join(filter(None, (head, scope, rest)))


def batch_figures(tables: Mapping[str, pa.Table], tokens_per_row: int) -> Figures:
    """Return every figure of one step's batch that its tables give, by the names of `MEANINGS` and in their order."""
    found = dict(trace_figures(tables["traces"]))
    if "verdicts" in tables:
        found |= verdict_figures(tables["traces"], tables["verdicts"])
    if "samples" in tables:
        found |= credit_figures(tables["samples"])
    if "batches" in tables:
        found |= packing_figures(tables["batches"], tables["batches"].num_rows * tokens_per_row)
    return found


def trace_figures(traces: pa.Table) -> Figures:
    """Return the figures of rollouts."""
    rewards = spread(_known_values(traces["reward"]))
    ended_well: Any = pc.is_in(traces["error_class"], value_set=pa.array(NOT_FAILED, pa.string()))
    return {
        "num_traces": traces.num_rows,
        "num_groups": len(pc.unique(traces["group_id"])),
        **{f"reward_{name}": rewards.get(name) for name in ("mean", "std", "min", "max")},
        "truncated_ratio": pc.mean(traces["is_truncated"]).as_py(),
        "errored_ratio": pc.mean(pc.invert(ended_well)).as_py(),
        "output_tokens_mean": pc.mean(traces["num_output_tokens"]).as_py(),
    }


def verdict_figures(traces: pa.Table, verdicts: pa.Table) -> Figures:
    """Return the figures of what the filters left of the rollouts."""
    ours = traces["trace_id"].filter(traces["trainable"]).combine_chunks()
    kept = verdicts["trace_id"].filter(verdicts["keep"])
    trainable: Any = pc.is_in(kept, value_set=ours)
    # Of no rows Arrow's sum is null unless `min_count` is 0.
    num_trainable = pc.sum(trainable, min_count=0).as_py()
    ratio = num_trainable / traces.num_rows if traces.num_rows else None
    return {"num_kept": len(kept), "num_trainable": num_trainable, "trainable_ratio": ratio}


def credit_figures(credits: pa.Table) -> Figures:
    """Return the figures of training samples and their advantages."""
    advantages = spread(_known_values(credits["advantage"]))
    return {
        "num_samples": credits.num_rows,
        **{f"advantage_{name}": advantages.get(name) for name in ("mean", "std")},
    }


def packing_figures(batches: pa.Table, capacity: int) -> Figures:
    """Return the figures of packed rows that have room for `capacity` tokens together; padding fills nothing."""
    rows = batches.filter(pc.greater(pc.list_value_length(batches["sample_ids"]), pa.scalar(0)))
    num_tokens = sum(borders[-1] for borders in cast(list[list[int]], rows["cu_seqlens"].to_pylist()))
    return {
        "num_packed": len(pc.list_flatten(batches["sample_ids"])),
        "num_rows": batches.num_rows,
        "num_tokens": num_tokens,
        "fill": num_tokens / capacity if capacity else None,
    }


def score_figures(traces: pa.Table, before: Sequence[Mapping[str, float]], window: int) -> Figures:
    """Return the figures of `SCORE_MEANINGS` of each named reward of a step's rollouts.

    `before` are the means by name of the steps before, in order. A trend is None until `window` steps
    have a mean, and left out where `window` is 0.
    """
    figures: dict[str, float | None] = {}
    for name, value in (now := score_means(traces.select(["rewards", "error_class"]).to_pylist())).items():
        figures[f"score_mean/{name}"] = value
        if window:
            means = [step[name] for step in (*before, now) if name in step][-window:]
            # A score that does not vary does not rise.
            trend = rank_correlation(range(window), means) or 0.0 if len(means) == window else None
            figures[f"score_trend/{name}"] = trend
    return figures


def score_means(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean score of each named reward, without its weight, over the rollouts that have it, by name."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        for name, score in named_scores(row).items() if row["error_class"] not in GIVEN_UP else ():
            scores.setdefault(name, []).append(score)
    return {name: mean(values) for name, values in sorted(scores.items())}


def named_scores(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the named rewards of a trace, without their weights; those that were not computed are not there."""
    rewards = json.loads(row["rewards"] or "{}").items()
    return {name: float(reward["score"]) for name, reward in rewards if reward and reward["score"] is not None}


def rank_correlation(first: Iterable[float], second: Iterable[float]) -> float | None:
    """Return Spearman's rank correlation of pairs, ties by their mean rank; None where either does not vary."""
    import polars as pl  # a tenth of a second to import

    value = pl.select(pl.corr(pl.Series(list(first)), pl.Series(list(second)), method="spearman")).item()
    return None if value is None or math.isnan(value) else float(value)


def in_words(figures: Figures) -> str:
    """Return figures on one line, for a message; one that is not known is null."""
    return ", ".join(f"{name} {'null' if value is None else f'{value:.6g}'}" for name, value in figures.items())


def _known_values(column: "pa.ChunkedArray[Any]") -> list[float]:
    return cast(list[float], column.drop_null().to_pylist())


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, std (population), min and max of some numbers, in whatever order; empty of none.

    Without std, and with a warning that says why, where the squares of finite numbers exceed float64.
    """
    if not values:
        return {}
    average, least, greatest = mean(values), float(min(values)), float(max(values))
    found = {"mean": average, "min": least, "max": greatest}
    try:
        found["std"] = math.sqrt(mean((value - average) ** 2 for value in values))
    except OverflowError:
        text = "no standard deviation of %d numbers from %g to %g: their squares exceed float64"
        _log.warning(text, len(values), least, greatest)
    return found


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean of numbers or flags, summed exactly, in whatever order; there must be one."""
    # Summed exactly, so that the order of rows does not show; fsum raises where infinities of both signs meet.
    numbers = [float(value) for value in values]
    if not all(map(math.isfinite, numbers)):
        return sum(numbers) / len(numbers)
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:  # the sum exceeds float64; the mean is between the least and the greatest number
        return math.fsum(number / len(numbers) for number in numbers)
