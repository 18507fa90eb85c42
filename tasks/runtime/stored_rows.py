"""Rows that a stage reads and writes a part at a time, so that its memory does not grow with the batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from storage.refs import Slice

PART_BYTES = 1 << 27
"""Bytes of rows that are written, and so read again, together; a row that is larger is a part of its own."""


@dataclass(frozen=True)
class StoredRows:
    """The rows of a table that a stage is given by reference; they are in parts, which have an order."""

    schema: pa.Schema
    num_parts: int
    read: Callable[[int, Sequence[str] | None], pa.Table]
    """Reads some columns of a part; all of them for None."""
    store: str = ""
    """The address of the store that has them."""
    slices: tuple[Slice, ...] = ()
    """The slices that they are, one for each part."""

    @classmethod
    def of(cls, table: pa.Table) -> "StoredRows":
        """Return rows that are in memory, as one part."""
        return cls(table.schema, 1, lambda number, columns: table if columns is None else table.select(list(columns)))

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the parts, in order."""
        for number in range(self.num_parts):
            yield self.read(number, columns)

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all rows, of columns that fit into memory."""
        if self.num_parts == 1:
            return self.read(0, columns)
        schema = self.schema if columns is None else pa.schema([self.schema.field(name) for name in columns])
        return pa.concat_tables([schema.empty_table(), *self.parts(columns)])


def rows_of(rows: "pa.Table | StoredRows") -> StoredRows:
    """Return rows by reference, which may be in memory."""
    return StoredRows.of(rows) if isinstance(rows, pa.Table) else rows


def in_parts(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield rows that come in small tables in larger ones; nothing for no table."""
    held: list[pa.Table] = []
    size = 0
    for table in tables:
        if held and size + table.nbytes > PART_BYTES:
            yield pa.concat_tables(held).combine_chunks()
            held, size = [], 0
        held.append(table)
        size += table.nbytes
    if held:
        yield pa.concat_tables(held).combine_chunks()
