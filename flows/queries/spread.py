"""What all replies of a run say of its steps: how their rewards are spread, and how many are identical."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from flows.queries.rollout_search import run_rollouts
from flows.queries.store_reader import StoreReader
from flows.queries.views import select_from

BINS = 20
"""Stretches of equal length between the lowest and the highest reward of the run."""


def spread_charts(reader: StoreReader, run: str, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Return the spread of rewards as `cells`, counts of rollouts by step, and the share of identical replies by step.

    They read every rollout of the run. What `flows.queries.charts` says of charts holds for them. Raises NotThere.
    """
    rows = run_rollouts(reader, run, {"run", "for_training", "step", "environment", "example_id", "reward", "reply"})
    return [each for each in (_spread(rows, steps), identical_replies(rows, steps)) if each["series"][0]["values"]]


def _spread(rows: pl.DataFrame, steps: Sequence[int]) -> dict[str, Any]:
    found = select_from(rows, "select step, bin, num_traces, low, high from reward_distribution")
    cells = {step: [0] * BINS for step in steps}
    for step, bin, count, *_ in found.filter(pl.col("step").is_in(list(steps))).iter_rows():
        cells[step][bin] = count
    counts = [float(sum(row)) or None for row in cells.values()]
    series = [{"name": "scored rollouts", "values": counts if any(counts) else []}]
    note, ends = "darker: a larger share of the step's rollouts", [found["low"].min(), found["high"].max()]
    return _chart("Spread of rewards", note, series) | {
        "cells": list(cells.values()),
        "range": ends,
        "unit": "rollouts",
    }


def identical_replies(rows: pl.DataFrame, steps: Sequence[int]) -> dict[str, Any]:
    """Return the share of identical replies by step, as view `identical_replies` has it."""
    by_step = dict(select_from(rows, "select step, share from identical_replies").iter_rows())
    series = [{"name": "identical", "values": [by_step.get(step) for step in steps] if by_step else []}]
    return _chart("Identical replies", "share of replies that another to the same example says too", series) | {
        "zero": True
    }


def _chart(title: str, note: str, series: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "note": note, "zero": False, "unit": "share", "series": series}
