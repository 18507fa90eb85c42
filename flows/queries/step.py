"""A step as plain values: what its rollouts earned, their outcomes, its groups, and what the updates measured."""

from collections.abc import Iterable
from typing import Any

import polars as pl

from flows.queries.compare import MEASURES
from flows.queries.step_history import present
from flows.queries.store_reader import StoreReader
from flows.queries.views import select_from
from storage.read.lineage import Work, row_identities

MEASURED = (
    *("update", *MEASURES, "mismatch_kl_max"),
    *("num_rows", "num_tokens", "rl_tokens", "ce_tokens", "ref_kl_tokens"),
)
"""Columns of an optimizer step that are returned; as in `storage.schemas.stage_tables.UPDATES`."""


def figures(frame: pl.DataFrame) -> dict[str, Any]:
    """Return what the traces of a step, or of an evaluation, say together, as views of a step have it.

    `rollouts` is the row of view `step_rollouts`, None without a trace; `rewards` are the rows of `step_rewards`,
    `filters` those of `filter_hits`.
    """
    # The views are of a step each; these rollouts may be of several.
    one = {"run": "", "step": 0, "for_training": True}
    frame = frame.with_columns(pl.lit(value, dtype=frame.schema[name]).alias(name) for name, value in one.items())
    return {
        "rollouts": next(iter(_rows(frame, "step_rollouts")), None),
        "rewards": _rows(frame, "step_rewards"),
        "outcomes": _counts(frame, "outcome", "detail"),
        "filters": select_from(frame, "select filter, num_found, num_decided from filter_hits order by 1").to_dicts(),
    }


def _rows(frame: pl.DataFrame, view: str) -> list[dict[str, Any]]:
    order = "order by environment nulls first, agent nulls first" if view == "step_rewards" else ""
    return select_from(frame, f"select * exclude (run, step, for_training) from {view} {order}").to_dicts()


def _counts(frame: pl.DataFrame, *columns: str) -> list[dict[str, Any]]:
    counted = frame.drop_nulls(columns[0]).group_by(columns).agg(num_traces=pl.len())
    return counted.sort(-pl.col("num_traces").cast(pl.Int64), *columns).to_dicts()


def updates(reader: StoreReader, run: str, works: Iterable[Work | None]) -> list[dict[str, Any]]:
    """Return what the optimizer steps of some trainings measured; MEASURED of each, in order."""
    trained = present(*works)
    rows = reader.frames(run).rows(trained, "updates").select("key", *MEASURED).sort("key", "update").drop("key")
    return reader.cache.once(("step_updates", row_identities(trained)), lambda: rows.collect().to_dicts())


def groups(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the groups of a frame of traces in order of their ids, numbers in them by value: view `groups`."""
    # Groups 3-2 and 3-10: each number with zeros before it. Ids are texts that others wrote, of any length.
    numbers = pl.col("group_id").str.extract_all(r"\d+|\D+").list.eval(pl.element().str.zfill(18)).list.join("")
    return select_from(frame, "select * exclude (run, step) from groups").sort(numbers, "group_id", "agent")
