"""What schemas are written in: column types, a column, a table, and the columns that every slice carries."""

from dataclasses import dataclass

import pyarrow as pa

TOKENS = pa.list_(pa.field("element", pa.int32(), nullable=False))
FLOATS = pa.list_(pa.field("element", pa.float32(), nullable=False))
NUMBERS = pa.list_(pa.field("element", pa.float64(), nullable=False))
FLAGS = pa.list_(pa.field("element", pa.bool_(), nullable=False))
INDICES = pa.list_(pa.field("element", pa.int32(), nullable=False))
NAMES = pa.list_(pa.field("element", pa.string(), nullable=False))
MOMENT = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True)
class Column:
    """One column: its name, Arrow type, what it means, and whether it may be null."""

    name: str
    type: pa.DataType
    meaning: str
    nullable: bool = False


@dataclass(frozen=True)
class Table:
    """One table: its name, what a row is, the columns that name a row within a slice, and its columns.

    What else must hold of every row is data as well: `aligned` names list columns of equal length, `aligned_or_empty`
    those that have that length or none, `logprobs` list columns whose values are at most 0, and `only_where` pairs a
    list of flags with the boolean column without which none of them may be set. Per-token floats are always finite.
    """

    name: str
    row: str
    row_id: tuple[str, ...]
    columns: tuple[Column, ...]
    aligned: tuple[str, ...] = ()
    aligned_or_empty: tuple[str, ...] = ()
    logprobs: tuple[str, ...] = ()
    only_where: tuple[tuple[str, str], ...] = ()

    @property
    def arrow(self) -> pa.Schema:
        """The schema that stages read and write, without the slice columns."""
        return pa.schema([pa.field(c.name, c.type, c.nullable) for c in self.columns])

    @property
    def stored(self) -> pa.Schema:
        """The schema on disk: the slice columns, then the table's own."""
        return pa.schema([pa.field(c.name, c.type, c.nullable) for c in (*SLICE_COLUMNS, *self.columns)])


SLICE_COLUMNS = (
    Column("run", pa.string(), "the run that computed the row; the only partition"),
    Column("step", pa.int64(), "the step of that run; 0-based"),
    Column("key", pa.string(), "the key of the work that made the row"),
    Column("attempt", pa.string(), "the attempt at that key; only attempts that the ledger names exist"),
    Column("seq", pa.int32(), "the row's place in its slice; Delta Lake keeps no order"),
)
