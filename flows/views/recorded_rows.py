"""Recorded rows of whole runs, to compare them: each table is looked through once, and no column per token is read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl
import pyarrow as pa

from storage.read.frames import holding
from storage.refs import Entry
from storage.schemas.stage_tables import TABLES
from storage.store import Store
from tasks.metrics.figures import (
    BATCH_COLUMNS,
    CREDIT_COLUMNS,
    TRACE_COLUMNS,
    VERDICT_COLUMNS,
    credit_figures,
    packing_figures,
    trace_figures,
    verdict_figures,
)

MEASURES = (
    "loss",
    "rl_loss",
    "ce_loss",
    "ref_kl_loss",
    "grad_norm",
    "entropy",
    "mismatch_kl",
    "masked_fraction",
    "learning_rate",
)
"""What the learner measures of an update; of several updates their mean counts."""
COLUMNS = {
    "traces": TRACE_COLUMNS,
    "verdicts": VERDICT_COLUMNS,
    "credits": CREDIT_COLUMNS,
    "batches": BATCH_COLUMNS,
    "updates": ["version", "update", "weights_sha256", *MEASURES],
}
MAKERS = {
    "traces": ("regrade", "rollout"),
    "verdicts": ("filtering",),
    "credits": ("advantage",),
    "batches": ("packing",),
    "updates": ("training",),
}
"""The stages that make a table; of those that a step has, the first counts."""


@dataclass(frozen=True)
class Made:
    """The rows that a step made, or several steps: a table is None where no step came that far."""

    traces: pl.DataFrame | None = None
    verdicts: pl.DataFrame | None = None
    credits: pl.DataFrame | None = None
    batches: pl.DataFrame | None = None
    updates: pl.DataFrame | None = None
    capacity: int = 0
    """Tokens that the packed rows have room for."""

    @property
    def weights(self) -> str | None:
        """The digest of the weights that the last update made."""
        digests = () if self.updates is None else self.updates.sort("version", "update")["weights_sha256"]
        return str(digests[-1]) if len(digests) else None

    def figures(self) -> dict[str, Any]:
        """Return the figures of `tasks.metrics.figures`, counts by reason, means of measures, and the digest of the weights."""
        return dict(self._figures)

    @cached_property
    def _figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.traces is not None:
            found |= trace_figures(arrow(self.traces))
        if self.traces is not None and self.verdicts is not None:
            found |= verdict_figures(arrow(self.traces), arrow(self.verdicts))
            found["reasons"] = _reasons(self.verdicts)
        if self.credits is not None:
            found |= credit_figures(arrow(self.credits))
        if self.batches is not None:
            found |= packing_figures(arrow(self.batches), self.capacity)
        if self.updates is not None:
            found |= {name: self.updates[name].mean() for name in MEASURES}
            found["weights"] = self.weights
        return found


def made(store: Store, works: Iterable[Mapping[str, Entry]]) -> list[Made]:
    """Return what each of the given works, entries by stage, has made; the tables are read together."""
    works = list(works)
    found = [_entries(work) for work in works]
    rows = {name: _read(store, name, [entry for each in found for entry in each.get(name, ())]) for name in COLUMNS}
    return [_made(work, entries, rows) for work, entries in zip(works, found, strict=True)]


def together(parts: Iterable[Made]) -> Made:
    """Return the rows of several steps as one."""
    steps = list(parts)
    tables = {name: _joined([getattr(step, name) for step in steps]) for name in COLUMNS}
    return Made(**tables, capacity=sum(step.capacity for step in steps))


def arrow(frame: pl.DataFrame) -> pa.Table:
    """Return a frame as an Arrow table of types that all of Arrow's functions know."""
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def _entries(work: Mapping[str, Entry]) -> dict[str, list[Entry]]:
    """Return, by table, the work that made it: several pieces of a stage where groups of the step were replaced."""
    makers = {name: next((stage for stage in stages if stage in work), None) for name, stages in MAKERS.items()}
    return {
        name: [entry for other, entry in work.items() if other.partition(".")[0] == stage]
        for name, stage in makers.items()
        if stage is not None
    }


def _read(store: Store, table: str, entries: Iterable[Entry]) -> dict[str, pl.DataFrame]:
    """Return the rows of finished works by attempt; attempts without rows are not there."""
    columns = ["attempt", "seq", *COLUMNS[table]]
    empty = pl.DataFrame(TABLES[table].stored.empty_table().select(columns))
    wanted: dict[str, set[str]] = {}
    for piece in (each for entry in entries for each in entry.slices(table) if each.rows):
        wanted.setdefault(piece.run, set()).add(piece.attempt)
    # A table that nothing was written to is not made by looking for its rows.
    rows = _scanned(store, table, wanted).select(columns).collect() if wanted else empty
    parts = rows.sort("seq").drop("seq").partition_by("attempt", as_dict=True, include_key=False)
    return {str(name): part for (name,), part in parts.items()} | {"": empty.drop("attempt", "seq")}


def _scanned(store: Store, table: str, wanted: Mapping[str, set[str]]) -> pl.LazyFrame:
    """Return the rows of attempts, given by run, out of the files that hold them: columns are pushed down."""
    stored = store.table(table)
    places = [store.root.child(f"{stored.place}/{each.path}") for each in holding(stored, wanted)]
    if not places:
        return pl.DataFrame(stored.data_schema.empty_table()).lazy()
    options = dict(store.root.options) or None
    rows = pl.scan_parquet(places, glob=False, hive_partitioning=False, storage_options=options)
    return rows.filter(pl.col("attempt").is_in(sorted(set[str]().union(*wanted.values()))))


def _made(
    work: Mapping[str, Entry], entries: Mapping[str, Sequence[Entry]], rows: Mapping[str, Mapping[str, pl.DataFrame]]
) -> Made:
    tables = {
        name: _of([each for one in own for each in one.slices(name)], rows[name]) for name, own in entries.items()
    }
    budget = work["packing"].section["packing"]["tokens_per_row"] if "packing" in work else 0
    return Made(**tables, capacity=budget * len(tables.get("batches", ())))


def _of(slices: Iterable[Any], rows: Mapping[str, pl.DataFrame]) -> pl.DataFrame:
    return pl.concat([rows[""], *(rows[piece.attempt] for piece in slices if piece.attempt in rows)])


def _joined(tables: Iterable[pl.DataFrame | None]) -> pl.DataFrame | None:
    frames = [frame for frame in tables if frame is not None]
    return pl.concat(frames, rechunk=True) if frames else None


def _reasons(verdicts: pl.DataFrame) -> dict[str, int]:
    if verdicts["keep"].all():
        return {}
    left_out = verdicts.filter(~pl.col("keep")).group_by("reason").len().sort("reason")
    return {str(reason): count for reason, count in left_out.iter_rows()}
