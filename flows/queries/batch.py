"""The packed batch of a step: its rows, their samples and tokens, what was measured, who decided."""

from dataclasses import dataclass
from typing import Any

import polars as pl

from flows.queries.request import NotThere
from flows.queries.step_history import StepLineage
from flows.queries.store_reader import StoreReader
from flows.queries.views import select
from storage.read.lineage import Work, row_identities


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
    def lineages(self) -> list[StepLineage]:
        """The ways from its rollouts through its samples into it."""
        return [
            StepLineage(self.run, traces, None, samples, self.batches, self.updates)
            for traces in self.traces
            for samples in self.samples
        ]

    @property
    def capacity(self) -> int | None:
        """Tokens that a row has room for; None where the ledger does not say."""
        room = self.batches.entry.section.get("packing", {}).get("tokens_per_row")
        return None if room is None else int(room)


def steps(reader: StoreReader, run: str) -> list[int]:
    """Return the steps of which a run has a packed batch. Raises NotThere for an unknown run."""
    return sorted({work.step for work in reader.frames(run).graph.makers("batches")})


def packed_step(reader: StoreReader, run: str, step: int) -> PackedStep:
    """Return the batch of a step: the one trained last, or the last one packed where none is trained.

    Raises NotThere, with the steps that have one.
    """
    graph = reader.frames(run).graph
    found = reader.history(run).batch(step)
    if found is None:
        packed = steps(reader, run)
        known = f"it has {len(packed)}, of steps {packed[0]} to {packed[-1]}" if packed else "it has none"
        raise NotThere(f"run {run!r} has no packed batch of step {step}; {known}")
    last, updates = found
    return PackedStep(run, step, last, graph.sources(last, "samples"), graph.sources(last, "traces"), updates)


def rows(reader: StoreReader, of: PackedStep) -> pl.DataFrame:
    """Return the rows of a batch in order, as view `batch_rows` has them."""
    return _cached_view(reader, of, 'select * exclude key from batch_rows order by "row"')


def samples(reader: StoreReader, of: PackedStep) -> pl.DataFrame:
    """Return the samples of a batch, by row and place in it, as view `batch_samples` has them."""
    return _cached_view(reader, of, "select * exclude batch_key from batch_samples")


def _cached_view(reader: StoreReader, of: PackedStep, query: str) -> pl.DataFrame:
    return reader.cache.once((query, *of.identity), lambda: select(reader.frames(of.run), of.lineages, query))


def updates(reader: StoreReader, of: PackedStep) -> pl.DataFrame:
    """Return what each optimizer step on a batch measured, as in the table `updates`; no rows before training."""
    works = [of.updates] if of.updates else []
    return reader.frames(of.run).rows(works, "updates").drop("run", "attempt", "seq").sort("update").collect()


def decisions(reader: StoreReader, of: PackedStep) -> list[dict[str, Any]]:
    """Return what was decided at the gates before a batch, in order of time, as in the table `decisions`."""
    graph = reader.frames(of.run).graph
    works = graph.users(of.batches, "batches", made="decisions")
    found = reader.frames(of.run).rows(works, "decisions").drop("run", "step", "attempt", "seq").collect()
    return found.sort("decided_at").to_dicts()


def row_samples(reader: StoreReader, of: PackedStep, row: int) -> pl.DataFrame:
    """Return the samples of a row in order: columns of `samples`, and what their tokens weigh, as `sample_weights`."""
    query = 'select * exclude (key, "row") from sample_weights where "row" = $row'
    weights = select(reader.frames(of.run), of.lineages, query, {"batches": pl.col("row") == row}, row=row)
    return samples(reader, of).filter(row=row).join(weights, on="place", how="left", maintain_order="left")
