"""How far the engine and the learner were apart on each trace of a step: read where somebody asks for it alone.

It is the one column of a list of traces that is made of values by token.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import polars as pl

from flows.queries.step_history import StepLineage
from flows.queries.store_reader import Library
from flows.viewer.data.training import by_sample
from storage.read.lineage import Work, row_identities

NAME, TITLE = "mismatch_kl", "mismatch KL"
OF_ROW = ("sample_ids", "cu_seqlens", "logprobs", "rl_weights")


def with_mismatch(
    library: Library, run: str, lineages: Sequence[StepLineage], frame: pl.DataFrame, names: Collection[str]
) -> pl.DataFrame:
    """Return the traces of a step with the column `mismatch_kl`: nulls, unless it is among `names`.

    It is the mean of r - 1 - log r over the tokens of a trace with rl weight, as the learner measures it over those of
    a step (tasks.learner.loss_metrics), r being the learner's probability over the engine's. Null for what was not
    trained on, and where no policy is known to have sampled.
    """
    trained = [lineage for lineage in lineages if lineage.updates]
    if not trained or not {NAME, TITLE} & set(names):
        return frame.with_columns(pl.lit(None, pl.Float64).alias(NAME))
    known = tuple(row_identities(lineage.works) for lineage in trained)
    found = library.kept(("step_mismatch", known), lambda: by_trace(library, run, trained))
    told = frame.join(found, on="trace_id", how="left", maintain_order="left")
    return told.with_columns(pl.when(pl.col("policy_key") != "").then(NAME).alias(NAME))


def by_trace(library: Library, run: str, lineages: Sequence[StepLineage]) -> pl.DataFrame:
    """Return `trace_id` and `mismatch_kl` of what was trained on with rl weight; see `with_mismatch`."""
    frames = library.frames(run)
    rows = frames.rows(_once(lineage.batches for lineage in lineages), "batches").select(OF_ROW).collect()
    measured = frames.rows(_once(lineage.updates for lineage in lineages), "token_statistics")
    learner = measured.select("sample_id", learner="logprobs").collect()
    named = (
        frames.rows(_once(lineage.credits for lineage in lineages), "credits").select("sample_id", "trace_id").collect()
    )
    own = by_sample(rows, ("logprobs", "rl_weights"))
    flat = own.join(learner, on="sample_id").join(named.unique("sample_id"), on="sample_id")
    flat = flat.explode("logprobs", "rl_weights", "learner").filter(pl.col("rl_weights") != 0)
    apart = flat["learner"].cast(pl.Float64).to_numpy() - flat["logprobs"].cast(pl.Float64).to_numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.expm1(apart) - apart  # numpy, as polars has no exact expm1
    return flat.select("trace_id", pl.Series(NAME, values)).group_by("trace_id").agg(pl.col(NAME).mean())


def _once(works: Iterable[Work | None]) -> list[Work]:
    return list({work.key: work for work in works if work is not None}.values())
