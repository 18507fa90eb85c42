"""One row of a packed batch, token by token: what the learner was given, cut into the samples it is of."""

import numpy as np
import polars as pl

from flows.queries.request import NotThere
from flows.queries.store_reader import Library
from flows.viewer.data.batch import Packed, rows, samples

WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
TOKENS = ("token_ids", "logprobs", "temperatures", "advantages", *WEIGHTS)
SHORT = {"token_ids": "token_id", "logprobs": "logprob", "temperatures": "temperature", "advantages": "advantage"}
"""How a column of one value per token is called where each token is a row."""


def tokens(library: Library, of: Packed, row: int) -> pl.DataFrame:
    """Return the tokens of a row in order: `place` (of the sample in the row), `token_id` and what goes with it.

    Columns: place, token_id, logprob, temperature, advantage, rl_weights, ce_weights, ref_kl_weights. Of a padding row
    the place is null. Raises NotThere for a row that the batch does not have.
    """
    packed = rows(library, of).filter(pl.col("row") == row)
    if packed.is_empty():
        raise NotThere(f"the batch of step {of.step} of run {of.run!r} has {len(rows(library, of))} rows, no row {row}")
    read = library.frames(of.run).rows([of.batches], "batches").filter(pl.col("row") == row)
    found = read.select(TOKENS).collect().explode(TOKENS)
    lengths = np.diff(packed["cu_seqlens"][0].to_numpy())
    places = np.repeat(np.arange(len(lengths)), lengths)
    known = pl.Series("place", places, dtype=pl.Int64) if packed["num_samples"][0] else pl.lit(None, pl.Int64)
    return found.rename(SHORT).select(known.alias("place"), pl.all())


def row_samples(library: Library, of: Packed, row: int) -> pl.DataFrame:
    """Return the samples of a row in order: columns of `data.batch.samples`, and the sums of their weights.

    `num_weighted` are the tokens that any component weighs, `rl_weights` and the like the sums over the sample's.
    """
    weighted = pl.any_horizontal(pl.col(name) != 0 for name in WEIGHTS)
    sums = (
        tokens(library, of, row)
        .drop_nulls("place")
        .group_by("place")
        .agg(pl.col(WEIGHTS).cast(pl.Float64).sum(), weighted.sum().cast(pl.Int64).alias("num_weighted"))
    )
    own = samples(library, of).filter(pl.col("row") == row)
    return own.join(sums, on="place", how="left", maintain_order="left")
