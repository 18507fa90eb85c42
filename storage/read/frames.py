"""The tables of a store for analysis: polars LazyFrames and Arrow datasets, with filters pushed down to the files.

Stage tables have the rows that the ledger names, system tables all of theirs. Digests are not checked; stages read
through `storage.slices`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from storage.delta.log import PARTITION
from storage.errors import SchemaError, StoreUnavailable
from storage.read.lineage import Graph, Work
from storage.read.views import Relations, SqlView, all_views, quote, select
from storage.records import ALL_RUNS
from storage.roots import Root
from storage.schemas.contract import read_tables
from storage.schemas.stage_tables import TABLES
from storage.schemas.system_tables import SYSTEM_TABLES
from storage.store import Store, open_store

if TYPE_CHECKING:
    import polars as pl
    import pyarrow.dataset as ds

MakeRelations = Callable[["Frames"], Relations]
"""Makes what the views of `storage.read.views` read of some tables."""

(USES,) = read_tables("uses.sql")
"""One slice as a run uses it."""


def existing_store(root: str | Path, options: Mapping[str, str] | None = None, read_only: bool = False) -> Store:
    """Open a store that is there. Raises LayoutError where there is none; no store is ever made.

    With `read_only` nothing can be written through it, not even a table that a new store lacks.
    """
    return open_store(root, options, read_only, make=False)


class Frames:
    """Every table of a store, as it was when this was made: `frames["traces"]`.

    Each row is there once, under the run that computed it. `run(name)` gives the same tables with the rows that a run
    uses, those that another run computed included.
    """

    def __init__(
        self,
        store: Store,
        relations: MakeRelations | None = None,
        graph: Graph | None = None,
        only: str | None = None,
    ) -> None:
        self.store = store
        self.only = only
        """The run whose rows these are; None for all rows."""
        self._relations = relations
        self._graph = graph

    @cached_property
    def graph(self) -> Graph:
        """The work whose rows are here, by key."""
        return Graph(self.store.counted_entries()) if self._graph is None else self._graph

    @property
    def names(self) -> list[str]:
        """The names of all tables, views last."""
        return [*TABLES, USES.name, *self.views]

    @property
    def views(self) -> dict[str, SqlView]:
        """The views by name; none where nothing makes the relations that they read."""
        return all_views() if self._relations else {}

    @cached_property
    def relations(self) -> Relations:
        """What the views read, by name; each is made when it is read."""
        return self._relations(self) if self._relations else {}

    @property
    def run_names(self) -> list[str]:
        """The runs whose rows are here."""
        return [self.only] if self.only else self.store.runs.names()

    def run(self, name: str) -> "Frames":
        """The same tables with the rows that a run uses. Raises RunUnknown for a run that the store does not have."""
        self.store.runs.events(name)
        return Frames(self.store, self._relations, self.graph.of_run(name), name)

    def __getitem__(self, name: str) -> "pl.LazyFrame":
        """A table by name; SchemaError if there is none of that name."""
        if name in self.views:
            return self._view(self.views[name])
        import polars as pl

        return pl.scan_pyarrow_dataset(self.dataset(name))

    def _view(self, view: SqlView) -> "pl.LazyFrame":
        """Return a view whose rows are read when they are collected, of the columns that are then needed."""
        import duckdb
        from polars.io.plugins import register_io_source

        def read(
            columns: list[str] | None, predicate: "pl.Expr | None", count: int | None, _: int | None
        ) -> "Iterator[pl.DataFrame]":
            query = f"select {', '.join(map(quote, columns or view.columns))} from {view.name}"
            try:
                rows = select(self.relations, query)
            except duckdb.Error as error:
                if damage := damage_of(error, self.store.root):
                    raise damage from OSError(str(error))
                raise
            rows = rows if predicate is None else rows.filter(predicate)
            yield rows if count is None else rows.head(count)

        listed = ", ".join(map(quote, view.columns))
        return register_io_source(
            read, schema=select(self.relations, f"select {listed} from {view.name} limit 0").schema
        )

    def rows(self, works: Iterable[Work], table: str) -> "pl.LazyFrame":
        """The rows of a table that some work made."""
        named = (piece for work in works for piece in work.slices_of(table))
        return self.store.table(table).scan(self.store.held_attempts(table, named))

    def dataset(self, name: str) -> "ds.Dataset":
        """A table that is stored, or `uses`, as an Arrow dataset; SchemaError if there is none of that name."""
        import pyarrow.dataset as ds  # which imports pandas, where that is installed

        if name == USES.name:
            return ds.dataset(_uses(self.graph, self.only))
        if name not in TABLES:
            known = ", ".join(self.names)
            raise SchemaError(f"there is no table {name!r}", self.store.root.address, "", f"the tables are: {known}")
        stored = self.store.table(name)
        if TABLES[name] in SYSTEM_TABLES:
            stored.refresh()
            rows = stored.dataset(stored.active_files())
            # A finding for which the rollouts of all runs were searched concerns each of them.
            return rows.filter(pc.field(PARTITION).isin([self.only, ALL_RUNS])) if self.only else rows
        named = (piece for work in self.graph.works.values() for piece in work.slices_of(name))
        attempts = self.store.held_attempts(name, named)
        files = stored.files_of(attempts)
        rows = stored.dataset(files)
        if all(file.attempt for file in files):
            return rows
        return rows.filter(pc.field("attempt").isin(sorted({*chain.from_iterable(attempts.values())})))


def damage_of(error: Exception, root: Root) -> StoreUnavailable | None:
    """Return what DuckDB says of a table's file that it could not read; None where it says something else."""
    if "reading the stream registered as" not in str(error):
        return None
    return StoreUnavailable(str(error), root.address, "the store was only read", "run `stagecoach repair --deep`")


def _uses(graph: Graph, only: str | None) -> pa.Table:
    rows = [
        (run, work.step, work.stage, work.key, piece.table, piece.attempt, piece.run, piece.rows)
        for work in graph.works.values()
        for run in work.runs
        for piece in work.slices
        if only in (None, run)
    ]
    return pa.Table.from_pylist([dict(zip(USES.arrow.names, row, strict=True)) for row in rows], schema=USES.arrow)
