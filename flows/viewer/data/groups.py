"""Groups: the rollouts of one example that are compared with each other, with what they earned."""

import re

import polars as pl

from flows.queries.store_reader import Library
from flows.viewer.data import step_traces
from tasks.metrics.accounting import ERRORED, FILTERED, STOPPED

SORTS = ("group", "example", "environment", "mean", "spread", "baseline", "size", "kept")
"""What groups can be sorted by; `group` is the order of their ids, numbers in them by value."""
_BY = {"example": "example_id", "mean": "reward_mean", "spread": "reward_spread", "size": "num_traces"}
_DIGITS = re.compile(r"(\d+)")


def groups(library: Library, run: str, step: int) -> pl.DataFrame:
    """Return one row for each group of a step and each agent in it, for agents earn different things.

    Columns: `group_id`, `agent`, `environment`, `example_id`, `num_traces`, `num_scored`, `reward_mean`,
    `reward_spread` (standard deviation over the scored ones, of the whole group and no sample of more), `reward_min`,
    `reward_max`; `baseline`, null where there is none or the members have different ones; `num_kept` (null before the
    filters), `num_trained` (null where that is not known any more), `num_filtered`, `num_errored`, `num_stopped`.
    Those that were stopped are in no reward. Raises NotThere.
    """
    return of_traces(step_traces.traces(library, run, step))


def of_traces(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the groups of a frame of traces in order of their ids, numbers in them by value; see `groups`."""
    reward = pl.col("reward").filter(pl.col("outcome") != STOPPED)
    baselines = pl.col("baseline").drop_nulls().unique()
    counts = {name: (pl.col("outcome") == outcome).sum() for name, outcome in _OUTCOMES.items()}
    found = frame.group_by("group_id", "agent", maintain_order=True).agg(
        pl.col("environment", "example_id").first(),
        num_traces=pl.len(),
        num_scored=reward.count(),
        reward_mean=reward.mean(),
        reward_spread=reward.std(ddof=0),
        reward_min=reward.min(),
        reward_max=reward.max(),
        baseline=pl.when(baselines.len() == 1).then(baselines.first()),
        num_kept=pl.when(pl.col("keep").count() > 0).then(pl.col("keep").sum()),
        num_trained=pl.when(pl.col("trained").is_not_null().all()).then(pl.col("trained").sum()),
        **counts,
    )
    whole = pl.col("^num_.*$").cast(pl.Int64)
    order = sorted(range(found.height), key=lambda at: (natural(found["group_id"][at]), found["agent"][at]))
    return found.with_columns(whole)[order]


_OUTCOMES = {"num_filtered": FILTERED, "num_errored": ERRORED, "num_stopped": STOPPED}


def in_order(rows: pl.DataFrame, sort: str, descending: bool) -> pl.DataFrame:
    """Return groups by one of SORTS; what has no value comes last, what is equal in the order that it had."""
    if sort == "group":
        return rows.reverse() if descending else rows
    by = {"kept": "num_kept"}.get(sort, _BY.get(sort, sort))
    return rows.sort(by, descending=descending, nulls_last=True, maintain_order=True)


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a key by which texts sort as people count: 3-10 after 3-2."""
    parts = _DIGITS.split(text)
    return [(1, int(part[:18]), part) if at % 2 else (0, 0, part) for at, part in enumerate(parts)]
