"""Attempts: what else was tried beside a trace: its group, its episode, and its example over the run's history."""

import polars as pl

from flows.queries.store_reader import Library
from flows.viewer.data.step_traces import traces_of
from flows.viewer.data.trace import Found
from flows.viewer.data.trace_index import index

MATE = (
    "trace_id",
    "key",
    "agent",
    "episode_id",
    "assignment_id",
    "reward",
    "advantage",
    "outcome",
    "detail",
    "error_class",
    "num_output_tokens",
)


def mates(library: Library, found: Found) -> pl.DataFrame:
    """Return the traces of its group that the same agent made, itself too, by assignment; columns as in `MATE`."""
    own = traces_of(library, found.run, [found.lineage])
    same = (pl.col("group_id") == found.row["group_id"]) & (pl.col("agent") == found.row["agent"])
    return own.filter(same).sort(_member(), "assignment_id").select(MATE)


def episode(library: Library, found: Found) -> pl.DataFrame:
    """Return the other traces of the same episode, those of other agents, in order; columns as in `MATE`."""
    own = traces_of(library, found.run, [found.lineage])
    same = (pl.col("episode_id") == found.row["episode_id"]) & (pl.col("trace_id") != found.trace_id)
    return own.filter(same).select(MATE)


def largest_advantage(library: Library, found: Found) -> float | None:
    """Return the size of the largest advantage of its batch of rollouts: what colours are measured by."""
    size = traces_of(library, found.run, [found.lineage])["advantage"].abs().max()
    return None if size is None else float(str(size))


def history(library: Library, found: Found) -> pl.DataFrame:
    """Return all attempts of the same agent at the same example over the run, by step; itself too.

    Columns: those of `trace_index.INDEX`, and `for_training`: false where the attempt scored a policy.
    """
    lineages = library.history(found.run).lineages
    rows = index(library, [lineage.traces for lineage in lineages])
    training = [lineage.traces.key for lineage in lineages if lineage.for_training]
    same = [pl.col(name) == found.row[name] for name in ("environment", "example_id", "agent")]
    rows = rows.filter(*same).with_columns(for_training=pl.col("key").is_in(training))
    return rows.sort("step", "for_training", maintain_order=True)


def _member() -> pl.Expr:
    """Return the number of a rollout within its group, the end of its assignment's id."""
    return pl.col("assignment_id").str.split("/").list.last().cast(pl.Int64, strict=False)
