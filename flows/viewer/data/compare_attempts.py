"""Attempts at one example by the policies of two runs, in training and in evaluations."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from flows.viewer.data.trace_index import index
from flows.viewer.library import Library
from flows.viewer.page import NotThere
from flows.views.identify import nearest

ATTEMPTS = {
    "side": pl.String,
    "run": pl.String,
    "step": pl.Int64,
    "for_training": pl.Boolean,
    "trace_id": pl.String,
    "key": pl.String,
    "agent": pl.String,
    "reward": pl.Float64,
    "error_class": pl.String,
    "policy_version": pl.Int64,
    "in_both": pl.Boolean,
}
"""One attempt as one of the runs uses it; `step` of an evaluation is the version that it scored. `in_both`: the other
side has the same rollout."""


def compared_attempts(library: Library, a: str, b: str, environment: str, example_id: str) -> pl.DataFrame:
    """Return one row for each attempt of either run at an example, a's first, by step; columns as in `ATTEMPTS`.

    Both runs may be the same one. Raises NotThere, with the nearest examples, where neither tried it.
    """
    sides = [_attempts(library, side, run, environment, example_id) for side, run in (("a", a), ("b", b))]
    found = pl.concat(sides)
    if found.is_empty():
        raise NotThere(_nowhere(library, (a, b), environment, example_id))
    shared = set(sides[0]["trace_id"]) & set(sides[1]["trace_id"])
    return found.with_columns(in_both=pl.col("trace_id").is_in(list(shared))).select(*ATTEMPTS)


def moments(attempts: pl.DataFrame) -> pl.DataFrame:
    """Return when each side tried the example: side, step, for_training, num_attempts, reward (mean), in order."""
    when = ("side", "step", "for_training")
    mean = pl.col("reward").mean()
    return attempts.group_by(when, maintain_order=True).agg(num_attempts=pl.len().cast(pl.Int64), reward=mean)


def typical(attempts: pl.DataFrame) -> Mapping[str, Any] | None:
    """Return the attempt whose reward is nearest to the mean, the first of several; None where there is none."""
    if attempts.is_empty():
        return None
    apart = (pl.col("reward") - pl.col("reward").mean()).abs()
    return attempts.sort(apart, nulls_last=True, maintain_order=True).row(0, named=True)


def _attempts(library: Library, side: str, run: str, environment: str, example_id: str) -> pl.DataFrame:
    chains = library.chains(run)
    rows = index(library, [chain.traces for chain in chains])
    rows = rows.filter((pl.col("environment") == environment) & (pl.col("example_id") == example_id))
    training = [chain.traces.key for chain in chains if chain.for_training]
    rows = rows.with_columns(side=pl.lit(side), run=pl.lit(run), for_training=pl.col("key").is_in(training))
    kinds = {name: kind for name, kind in ATTEMPTS.items() if name != "in_both"}
    return rows.sort("step", "for_training", maintain_order=True).select(
        pl.col(name).cast(kind) for name, kind in kinds.items()
    )


def _nowhere(library: Library, runs: tuple[str, str], environment: str, example_id: str) -> str:
    rows = pl.concat([index(library, [chain.traces for chain in library.chains(run)]) for run in runs])
    known = rows.select(pl.concat_str("environment", "example_id", separator="/").unique(maintain_order=True))
    near = nearest(f"{environment}/{example_id}", known.to_series())
    told = f"; the nearest examples are {', '.join(near)}" if near else ""
    return f"neither {runs[0]!r} nor {runs[1]!r} tried the example {example_id!r} of {environment!r}{told}"
