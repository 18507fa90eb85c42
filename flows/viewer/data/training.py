"""Training on a trace: the samples that it became, the batch rows that they are in, and what they weigh there."""

from collections.abc import Sequence

import polars as pl

from flows.queries.store_reader import Library
from flows.viewer.data.trace import Found
from storage.read.lineage import Work

SAMPLE = ("sample_id", "branch", "path", "reward", "baseline", "advantage", "num_tokens")
WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")


def samples(library: Library, found: Found) -> pl.DataFrame:
    """Return the samples of a trace by branch: columns of `SAMPLE`, and the `row` and `update` that each is in.

    Row and update are null where a sample was not packed: none of its tokens has a weight, or it was not yet. There
    are no rows where the trace has no credit.
    """
    frames = library.frames()
    own = frames.rows(works(found.lineage.credits), "credits").filter(pl.col("trace_id") == found.trace_id)
    packed = frames.rows(works(found.lineage.batches), "batches").select("row", "update", sample_id="sample_ids")
    credited = own.select(SAMPLE).sort("branch").collect()
    rows = packed.explode("sample_id").filter(pl.col("sample_id").is_in(credited["sample_id"].to_list())).collect()
    return credited.join(rows, on="sample_id", how="left", maintain_order="left")


def packed_weights(library: Library, found: Found, own: pl.DataFrame) -> pl.DataFrame:
    """Return the weights of a trace's samples as their batch rows have them: one row for each of those packed.

    `own` are its `samples`. Columns: `sample_id`, and a list by token for each of `WEIGHTS`: as the learner was given
    them, scaled where losses are divided by constant lengths (tasks.packing.stage), 0 at the first token.
    """
    batches = library.frames().rows(works(found.lineage.batches), "batches")
    read = batches.filter(pl.col("row").is_in(own["row"].drop_nulls().unique().to_list()))
    cut = by_sample(read.select("sample_ids", "cu_seqlens", *WEIGHTS).collect(), WEIGHTS)
    return cut.filter(pl.col("sample_id").is_in(own["sample_id"].to_list()))


def by_sample(rows: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Return rows of a batch as one row for each sample, with its own part of the lists by token `names`."""
    border = pl.col("cu_seqlens")
    rows = rows.filter(pl.col("sample_ids").list.len() > 0).with_columns(
        start=border.list.head(border.list.len() - 1), length=border.list.diff(null_behavior="drop")
    )
    each = rows.rename({"sample_ids": "sample_id"}).explode("sample_id", "start", "length")
    return each.select("sample_id", *(pl.col(name).list.slice("start", "length") for name in names))


def works(work: Work | None) -> Sequence[Work]:
    """Return a piece of work as a list, which is empty where it is not done."""
    return [work] if work else []
