"""What differs between the rows that two runs made of a step, or of several: by trace, by sample and by group."""

from typing import Any

import polars as pl

from flows.views.recorded_rows import Made

SHOWN = 10
KEPT = "kept"


def between(a: Made, b: Made) -> dict[str, Any]:
    """Return what differs over the traces and samples that both made; None where there is nothing to compare.

    Traces are the same where their ids are: those that were sampled anew have ids of their own.
    """
    return {**_traces(a, b), **_samples(a, b), "weights_equal": _weights_equal(a, b)}


def detail(a: Made, b: Made, most: int = SHOWN) -> dict[str, Any]:
    """Return the traces with another verdict, and the samples and groups that differ most; at most so many of each."""
    return {
        "verdicts": changed_verdicts(a, b).head(most).to_dicts(),
        "samples": changed_advantages(a, b).head(most).to_dicts(),
        "groups": changed_groups(a, b).head(most).to_dicts(),
    }


def changed_verdicts(a: Made, b: Made) -> pl.DataFrame:
    """Return the shared traces whose verdict is another: trace_id, and each run's `kept` or reason; in order of ids."""
    found = [_fates(made) for made in (a, b)]
    joined = found[0].join(found[1], on="trace_id", suffix="_b").rename({"fate": "a", "fate_b": "b"})
    return joined.filter(pl.col("a") != pl.col("b")).sort("trace_id")


def changed_advantages(a: Made, b: Made) -> pl.DataFrame:
    """Return the shared samples whose advantage is another, the greatest difference first: both, and b minus a."""
    joined = _shared_advantages(a, b)
    return joined.filter(pl.col("difference") != 0).sort(
        pl.col("difference").abs(), "sample_id", descending=[True, False]
    )


def changed_groups(a: Made, b: Made) -> pl.DataFrame:
    """Return the shared groups that differ: each run's mean reward and traces kept, the greatest difference first."""
    one, other = _groups(a), _groups(b)
    joined = one.join(other, on="group_id", suffix="_b")
    apart = (pl.col("reward_mean_b") - pl.col("reward_mean")).abs().fill_null(0)
    kept = (pl.col("num_kept_b") - pl.col("num_kept")).abs().fill_null(0)
    advantage = _group_advantages(a, b)
    joined = joined.join(advantage, on="group_id", how="left")
    moved = pl.col("max_advantage_difference").fill_null(0)
    differing = joined.filter((apart > 0) | (kept > 0) | (moved > 0))
    ordered = differing.sort(moved, apart, kept, "group_id", descending=[True, True, True, False])
    return ordered.rename({"reward_mean": "reward_mean_a", "num_kept": "num_kept_a"})


def _traces(a: Made, b: Made) -> dict[str, Any]:
    if a.traces is None or b.traces is None:
        return dict.fromkeys(("num_shared_traces", "num_rewards_changed", "kept_only_a", "kept_only_b"))
    joined = a.traces.join(b.traces, on="trace_id", suffix="_b")
    changed = joined.filter(~pl.col("reward").eq_missing(pl.col("reward_b")))
    judged = changed_verdicts(a, b) if a.verdicts is not None and b.verdicts is not None else None
    only = [None if judged is None else judged.filter(pl.col(run) == KEPT)["trace_id"].to_list() for run in "ab"]
    return {
        "num_shared_traces": joined.height,
        "num_rewards_changed": changed.height,
        "kept_only_a": only[0],
        "kept_only_b": only[1],
    }


def _samples(a: Made, b: Made) -> dict[str, Any]:
    names = ("num_shared_samples", "num_advantages_changed", "max_advantage_difference", "mean_advantage_difference")
    if a.credits is None or b.credits is None:
        return dict.fromkeys(names)
    joined = _shared_advantages(a, b)
    size = joined["difference"].abs()
    changed = joined.filter(pl.col("difference") != 0).height
    return dict(zip(names, (joined.height, changed, size.max(), size.mean()), strict=True))


def _shared_advantages(a: Made, b: Made) -> pl.DataFrame:
    frames = [_frame(made.credits, "sample_id", "group_id", "advantage") for made in (a, b)]
    joined = frames[0].join(frames[1].drop("group_id"), on="sample_id", suffix="_b")
    both = joined.rename({"advantage": "a", "advantage_b": "b"})
    return both.with_columns((pl.col("b") - pl.col("a")).alias("difference"))


def _group_advantages(a: Made, b: Made) -> pl.DataFrame:
    size = pl.col("difference").abs().max().alias("max_advantage_difference")
    return _shared_advantages(a, b).group_by("group_id").agg(size)


def _groups(made: Made) -> pl.DataFrame:
    traces = _frame(made.traces, "group_id", "trace_id", "reward")
    fates = _fates(made)
    kept = pl.when(pl.col("fate").count() > 0).then((pl.col("fate") == KEPT).sum().cast(pl.Int64)).alias("num_kept")
    joined = traces.join(fates, on="trace_id", how="left")
    return joined.group_by("group_id").agg(pl.col("reward").mean().alias("reward_mean"), kept)


def _fates(made: Made) -> pl.DataFrame:
    verdicts = _frame(made.verdicts, "trace_id", "keep", "reason")
    fate = pl.when("keep").then(pl.lit(KEPT)).otherwise(pl.col("reason").cast(pl.String)).alias("fate")
    return verdicts.select("trace_id", fate)


def _frame(frame: pl.DataFrame | None, *columns: str) -> pl.DataFrame:
    """Return columns of a table; without rows where it was not made."""
    types = {"advantage": pl.Float64, "reward": pl.Float64, "keep": pl.Boolean}
    if frame is None:
        return pl.DataFrame(schema={name: types.get(name, pl.String) for name in columns})
    return frame.select(columns)


def _weights_equal(a: Made, b: Made) -> bool | None:
    return None if None in (a.weights, b.weights) else a.weights == b.weights
