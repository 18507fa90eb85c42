"""The packed batch of a step: its rows, their samples and tokens, what was measured, who decided."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from flows.queries.request import NotThere
from flows.queries.store_reader import StoreReader
from storage.read.lineage import Work, row_identities
from tasks.inference.trace_rows.token_texts import TokenizerUnreadable, tokenizer_of

ROW = ("row", "update", "rank", "micro_step", "sample_ids", "cu_seqlens", "rl_tokens", "ce_tokens", "ref_kl_tokens")
SAMPLE = ("sample_id", "trace_id", "branch", "group_id", "reward", "baseline", "advantage", "num_tokens")
TRACE = ("trace_id", "environment", "example_id", "agent", "policy_version", "staleness", "num_output_tokens")


@dataclass(frozen=True)
class PackedStep:
    """A batch, and the work around it as far as a run has done it."""

    run: str
    step: int
    batches: Work
    """The packing itself."""
    samples: list[Work]
    """The work that made its samples."""
    traces: list[Work]
    """The work that made its rollouts."""
    updates: Work | None
    """The training on it; None as long as there is none."""

    @property
    def identity(self) -> tuple[str, ...]:
        """The identity of all rows that its samples are read from: it is the key of what is cached of them."""
        return row_identities((self.batches, *self.samples, *self.traces))

    @property
    def capacity(self) -> int | None:
        """Tokens that a row has room for; None where the ledger does not say."""
        room = self.batches.entry.section.get("packing", {}).get("tokens_per_row")
        return None if room is None else int(room)


def steps(library: StoreReader, run: str) -> list[int]:
    """Return the steps of which a run has a packed batch. Raises NotThere for an unknown run."""
    return sorted({work.step for work in library.frames(run).graph.makers("batches")})


def packed_step(library: StoreReader, run: str, step: int) -> PackedStep:
    """Return the batch of a step: the one trained last, or the last one packed where none is trained.

    Raises NotThere, with the steps that have one.
    """
    graph = library.frames(run).graph
    found = library.history(run).batch(step)
    if found is None:
        there = steps(library, run)
        known = f"it has batches of the steps {_spans(there)}" if there else "none of its steps has one"
        raise NotThere(f"run {run!r} has no packed batch of step {step}; {known}")
    last, updates = found
    sources = {table: graph.sources(last, table) for table in ("samples", "traces")}
    return PackedStep(run, step, last, sources["samples"], sources["traces"], updates)


def _spans(numbers: Iterable[int]) -> str:
    """Return sorted numbers as spans: 0-3, 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in spans)


def rows(library: StoreReader, of: PackedStep) -> pl.DataFrame:
    """Return the rows of a batch in order: columns as in `ROW`, `num_tokens`, `num_samples` and `fill`.

    `fill` is the share of a row's room that samples take: 0 in a padding row, null where the room is not known.
    """
    return library.cached_value(("batch rows", *of.batches.identity), lambda: _rows(library, of))


def _rows(library: StoreReader, of: PackedStep) -> pl.DataFrame:
    found = library.frames(of.run).rows([of.batches], "batches").select(ROW).sort("row").collect()
    sampled = pl.col("sample_ids").list.len() > 0
    return found.with_columns(
        num_tokens=pl.when(sampled).then(pl.col("cu_seqlens").list.last()).otherwise(0).cast(pl.Int64),
        num_samples=pl.col("sample_ids").list.len().cast(pl.Int64),
    ).with_columns(fill=pl.col("num_tokens") / pl.lit(of.capacity, pl.Float64))


def samples(library: StoreReader, of: PackedStep) -> pl.DataFrame:
    """Return the samples of a batch, by row and place in it.

    Columns: `row`, `place`, `start` (its first token in the row), those of `SAMPLE` and `TRACE`, and `key`, the work
    that made the rollout.
    """
    return library.cached_value(("batch samples", *of.identity), lambda: _samples(library, of))


def _samples(library: StoreReader, of: PackedStep) -> pl.DataFrame:
    frames = library.frames(of.run)
    credited = frames.rows(of.samples, "samples").select(SAMPLE).collect()
    traces = frames.rows(of.traces, "traces").select("key", *TRACE).collect()
    placed = rows(library, of).filter(pl.col("num_samples") > 0)
    starts = pl.col("cu_seqlens").list.head(pl.col("cu_seqlens").list.len() - 1)
    lengths = pl.col("cu_seqlens").list.diff(null_behavior="drop").cast(pl.List(pl.Int64))
    names = {"start": starts, "sample_id": pl.col("sample_ids"), "length": lengths}
    each = placed.select("row", **names).explode(*names).with_columns(place=pl.int_range(pl.len()).over("row"))
    # Credits may have been dropped for their age: whose the samples are, and how long, the batch says itself.
    of_trace, branch = pl.col("sample_id").str.extract(r"(?s)^(.*)/"), pl.col("sample_id").str.extract(r"([^/]*)$")
    return (
        each.join(credited, on="sample_id", how="left", maintain_order="left")
        .with_columns(
            trace_id=pl.coalesce("trace_id", of_trace),
            branch=pl.coalesce("branch", branch.cast(pl.Int32, strict=False)),
            num_tokens=pl.coalesce("num_tokens", "length"),
        )
        .join(traces, on="trace_id", how="left", maintain_order="left")
        .select("row", "place", "start", *SAMPLE, *TRACE[1:], "key")
    )


def updates(library: StoreReader, of: PackedStep) -> pl.DataFrame:
    """Return what each optimizer step on a batch measured, as in the table `updates`; no rows before training."""
    works = [of.updates] if of.updates else []
    return library.frames(of.run).rows(works, "updates").drop("run", "attempt", "seq").sort("update").collect()


def decisions(library: StoreReader, of: PackedStep) -> list[dict[str, Any]]:
    """Return what was decided at the gates before a batch, in order of time, as in the table `decisions`."""
    graph = library.frames(of.run).graph
    works = graph.users(of.batches, "batches", made="decisions")
    found = library.frames(of.run).rows(works, "decisions").drop("run", "step", "attempt", "seq").collect()
    return found.sort("decided_at").to_dicts()


WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
TOKENS = ("token_ids", "logprobs", "temperatures", "advantages", *WEIGHTS)
SHORT = {"token_ids": "token_id", "logprobs": "logprob", "temperatures": "temperature", "advantages": "advantage"}
"""How a column of one value per token is called where each token is a row."""


def tokens(library: StoreReader, of: PackedStep, row: int) -> pl.DataFrame:
    """Return the tokens of a row in order: `place` (of the sample in the row), `token_id` and what goes with it.

    Columns: place, token_id, logprob, temperature, advantage, rl_weights, ce_weights, ref_kl_weights. Of a padding row
    the place is null. Raises NotThere for a row that the batch does not have.
    """
    packed = rows(library, of).filter(pl.col("row") == row)
    if packed.is_empty():
        raise NotThere(f"the batch of step {of.step} of run {of.run!r} has {len(rows(library, of))} rows, no row {row}")
    read = library.frames(of.run).rows([of.batches], "batches").filter(pl.col("row") == row)
    found = read.select(TOKENS).collect().explode(TOKENS)
    # In a padding row they are of no sample: its tokens have no place.
    lengths = np.diff(packed["cu_seqlens"][0].to_numpy())
    places = np.repeat(np.arange(len(lengths)), lengths)
    known = pl.Series("place", places, dtype=pl.Int64) if packed["num_samples"][0] else pl.lit(None, pl.Int64)
    return found.rename(SHORT).select(known.alias("place"), pl.all())


def row_samples(library: StoreReader, of: PackedStep, row: int) -> pl.DataFrame:
    """Return the samples of a row in order: columns of `samples`, and the sums of their weights.

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


def texts(library: StoreReader, run: str, ids: Sequence[int]) -> list[tuple[str, bool]]:
    """Return what each token adds to the text of a sample, and whether it is a special one.

    Where the tokenizer is gone or damaged, the ids stand for the texts.
    """
    # The last policy first: its tokenizer is that of all of them, and older weights may have been removed.
    policies = [work.key for work in library.frames(run).graph.makers("policies")]
    try:
        found = tokenizer_of(library.store, library.config(run), policies[-1], policies[::-1]) if policies else None
    except TokenizerUnreadable:
        found = None
    if found is None:
        return [(f"⟨{number}⟩", False) for number in ids]
    return [(each.shown, each.special) for each in found.of(ids)]
