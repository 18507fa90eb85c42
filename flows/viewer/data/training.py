"""Training on a trace: the samples that it became, the batch rows that they are in, and the update that was made."""

from collections.abc import Sequence

import polars as pl

from flows.viewer.data.trace import Found
from flows.viewer.library import Library
from storage.lineage import Work

SAMPLE = ("sample_id", "branch", "path", "reward", "baseline", "advantage", "num_tokens")


def samples(library: Library, found: Found) -> pl.DataFrame:
    """Return the samples of a trace by branch: columns of `SAMPLE`, and the `row` and `update` that each is in.

    Row and update are null where a sample was not packed: none of its tokens has a weight, or it was not yet. There
    are no rows where the trace has no credit.
    """
    frames = library.frames()
    own = frames.of(works(found.chain.credits), "credits").filter(pl.col("trace_id") == found.trace_id)
    packed = frames.of(works(found.chain.batches), "batches").select("row", "update", sample_id="sample_ids")
    credited = own.select(SAMPLE).sort("branch").collect()
    rows = packed.explode("sample_id").filter(pl.col("sample_id").is_in(credited["sample_id"].to_list())).collect()
    return credited.join(rows, on="sample_id", how="left", maintain_order="left")


def works(work: Work | None) -> Sequence[Work]:
    """Return a piece of work as a list, which is empty where it is not done."""
    return [work] if work else []
