"""What all replies of a run say of its steps: how their rewards are spread, and how many are identical."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from flows.queries.rollout_search import run_rollouts
from flows.queries.store_reader import StoreReader

BINS = 20
"""Stretches of equal length between the lowest and the highest reward of the run."""


def spread_charts(library: StoreReader, run: str, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Return the spread of rewards as `cells`, counts of rollouts by step, and the share of identical replies by step.

    They read every rollout of the run. What `flows.queries.charts` says of charts holds for them. Raises NotThere.
    """
    rows = run_rollouts(library, run, {"for_training", "step", "environment", "example_id", "reward", "reply"})
    rows = rows.filter("for_training")
    return [each for each in (_spread(rows, steps), identical_replies(rows, steps)) if each["series"][0]["values"]]


def _spread(rows: pl.DataFrame, steps: Sequence[int]) -> dict[str, Any]:
    scored = rows.filter(pl.col("reward").is_finite())
    low, high = scored["reward"].min(), scored["reward"].max()
    cells = [[0] * BINS for _ in steps]
    if low is not None and high is not None:
        width = (high - low) / BINS or 1.0  # type: ignore[operator]
        place = ((pl.col("reward") - low) / width).floor().clip(0, BINS - 1).cast(pl.Int64)
        at = {step: number for number, step in enumerate(steps)}
        for step, stretch, count in scored.group_by("step", place.alias("bin")).len().iter_rows():
            if step in at:
                cells[at[step]][stretch] = count
    counts = [float(sum(each)) or None for each in cells]
    series = [{"name": "scored rollouts", "values": counts if any(counts) else []}]
    note = "darker: a larger share of the step's rollouts"
    return _chart("Spread of rewards", note, series) | {"cells": cells, "range": [low, high], "unit": "rollouts"}


def identical_replies(rows: pl.DataFrame, steps: Sequence[int]) -> dict[str, Any]:
    """Return the share of identical replies; `rows` have step, environment, example_id and reply."""
    alike = ["step", "environment", "example_id", "reply"]
    counts = rows.drop_nulls("reply").group_by(alike).len()
    same = pl.col("len").filter(pl.col("len") > 1).sum() / pl.col("len").sum()
    by_step = dict(counts.group_by("step").agg(same.alias("share")).iter_rows())
    values = [by_step.get(step) for step in steps]
    series = [{"name": "identical", "values": values if by_step else []}]
    return _chart("Identical replies", "share of replies that another to the same example says too", series) | {
        "zero": True
    }


def _chart(title: str, note: str, series: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "note": note, "zero": False, "unit": "share", "series": series}
