"""Contracts of tables: column types, columns, tables, and checks of rows against them.

Checks run on what is about to be written and on what was read, because Delta Lake casts in silence and a wrong row is
cheap to refuse here and expensive anywhere later.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.errors import InvariantBreach, SchemaError

ROW_GROUP_BYTES = 1 << 18
"""Smallest row group of a table that is read row by row: about 9,000 packed tokens. Smaller ones cost more to describe
in the file than they save."""


def list_of(element: pa.DataType) -> "pa.ListType[Any]":
    """Return the type of lists without nulls; `element` is what Parquet and Delta call the item."""
    return pa.list_(pa.field("element", element, nullable=False))


def struct_of(**types: pa.DataType) -> pa.StructType:
    """Return the type of structs whose fields are never null."""
    return pa.struct([pa.field(name, each, nullable=False) for name, each in types.items()])


TOKENS = list_of(pa.int32())
# What is computed for a token is float32, as engine and learner have it; what is summed up is float64.
FLOATS = list_of(pa.float32())
FLAGS = list_of(pa.bool_())
INDICES = list_of(pa.int32())
NAMES = list_of(pa.string())
FILE = struct_of(path=pa.string(), size=pa.int64(), sha256=pa.string())
TYPES: dict[str, pa.DataType] = {
    "varchar": pa.string(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "boolean": pa.bool_(),
    "float": pa.float32(),
    "double": pa.float64(),
    "blob": pa.binary(),
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "input": struct_of(name=pa.string(), key=pa.string()),
    "slice": struct_of(
        table=pa.string(),
        run=pa.string(),
        attempt=pa.string(),
        rows=pa.int64(),
        digest=pa.string(),
        files=list_of(FILE),
    ),
}
"""The types of columns as the `.sql` files of tables spell them; `[]` after one is a list of it."""
_TABLE = re.compile(
    r"((?:^-- .+\n)+)create table (\w+) \(\n((?:    .+\n)+)    primary key \((.+)\)\n\);$", re.MULTILINE
)
_COLUMN = re.compile(r'^    "?(\w+)"? (\w+)((?:\[\])*)( null)?,  -- (.+(?:\n        -- .+)*)$', re.MULTILINE)


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
    row_by_row: bool = False
    """Whether its rows are large and read one by one: few of them are then in a row group of a file."""

    @cached_property
    def arrow(self) -> pa.Schema:
        """The schema that stages read and write, without the slice columns."""
        return pa.schema([pa.field(c.name, c.type, c.nullable) for c in self.columns])

    @cached_property
    def stored(self) -> pa.Schema:
        """The schema on disk: the slice columns, then the table's own."""
        return pa.schema([pa.field(c.name, c.type, c.nullable) for c in (*SLICE_COLUMNS, *self.columns)])

    def row_groups(self, rows: pa.Table) -> list[pa.Table]:
        """Return rows as the row groups of a file, at least one: all together, or each of at least ROW_GROUP_BYTES."""
        if not self.row_by_row:
            return [rows]
        sizes = np.cumsum([0, *(rows.slice(row, 1).nbytes for row in range(rows.num_rows))])
        borders = [0]
        while borders[-1] < rows.num_rows:
            end = int(np.searchsorted(sizes, sizes[borders[-1]] + ROW_GROUP_BYTES))
            borders.append(min(end, rows.num_rows))
        return [rows.slice(start, end - start) for start, end in pairwise(borders)] or [rows]


SLICE_COLUMNS = (
    Column("run", pa.string(), "the run that computed the row; the only partition"),
    Column("step", pa.int64(), "the step of that run; 0-based"),
    Column("key", pa.string(), "the key of the work that made the row"),
    Column("attempt", pa.string(), "the attempt at that key; only attempts that the ledger names exist"),
    Column("seq", pa.int32(), "the row's place in its slice; Delta Lake keeps no order"),
)


def read_tables(file: str, rules: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> tuple[Table, ...]:
    """Return the tables of a file of `create table` statements beside this module; `rules` for rows go by table."""
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    tables = _TABLE.findall(text)
    assert len(tables) == text.count("create table"), f"{file}: a table is not of the form that is read here"
    return tuple(
        Table(name, _comment(row), tuple(row_id.split(", ")), _columns(columns), **rules.get(name, {}))
        for row, name, columns, row_id in tables
    )


def _columns(text: str) -> tuple[Column, ...]:
    unread = _COLUMN.sub("", text).strip()
    assert not unread, f"not of the form of a column: {unread}"
    columns = []
    for name, kind, brackets, nullable, meaning in _COLUMN.findall(text):
        column_type: pa.DataType = TYPES[kind]
        for _ in range(brackets.count("[]")):
            column_type = list_of(column_type)
        columns.append(Column(name, column_type, _comment(meaning), bool(nullable)))
    return tuple(columns)


def _comment(text: str) -> str:
    return " ".join(line.strip().removeprefix("-- ") for line in text.strip().splitlines())


@dataclass(frozen=True)
class RowPlace:
    """Where rows belong, for messages: run, step and key are empty or -1 where they are not known."""

    table: str
    run: str = ""
    step: int = -1
    key: str = ""

    def __str__(self) -> str:
        return f"run {self.run!r}, step {self.step}, table {self.table!r}, key {self.key!r}"


def check_schema(found: pa.Schema, wanted: pa.Schema, place: RowPlace) -> None:
    """Raise SchemaError unless names, order, Arrow types and nullability, nested ones too, are exactly those wanted."""
    if found.equals(wanted, check_metadata=False):
        return
    has, needs = (dict.fromkeys(map(str, schema)) for schema in (found, wanted))
    differences = ("missing", needs.keys() - has), ("unexpected", has.keys() - needs)
    what = (
        "; ".join(f"{label}: {', '.join(sorted(names))}" for label, names in differences if names)
        or "columns in another order"
    )
    raise SchemaError(f"columns differ from the contract: {what}", str(place), _SAFE, "build the table with its schema")


def check_rows(rows: pa.Table, table: Table, place: RowPlace) -> None:
    """Check rows of a stage, without slice columns, against their table's contract.

    Raises SchemaError for columns or nulls, InvariantBreach for rows: doubled row ids, per-token arrays of unequal
    length, floats that are not finite, log-probs above zero, flags set where they cannot be.
    """
    check_schema(rows.schema, table.arrow, place)
    # Nulls come first: the checks after this read values without asking for them.
    for field in rows.schema:
        for chunk in rows.column(field.name).chunks:
            _check_nulls(chunk, field, field.name, place)
    if not rows.num_rows:
        return
    _check_ids(rows, table, place)
    _check_lengths(rows, table, place)
    for name, wrong, rule in _value_rules(rows, table):
        if wrong.any():
            element, lengths = int(wrong.argmax()), _lengths(rows, name)
            row = int(np.searchsorted(np.cumsum(lengths), element, side="right"))
            within, value = element - int(lengths[:row].sum()), _flat(rows, name)[element]
            what = f"{name!r} holds {value} at position {within}: {rule} ({int(wrong.sum())} such values)"
            raise _breach(what, rows, table, name, row, place)


_SAFE = "nothing was written; everything in the ledger stands"
_DO = "look at the stage that made the row; run again once it is mended"


def _check_nulls(values: Any, field: Any, path: str, place: RowPlace) -> None:
    if not field.nullable and values.null_count:
        row = int(np.argmin(values.is_valid().to_numpy(zero_copy_only=False)))
        raise SchemaError(f"column {path!r} holds a null at {row}, which the contract forbids", str(place), _SAFE, _DO)
    if pa.types.is_list(field.type):
        _check_nulls(values.flatten(), field.type.value_field, f"{path}.element", place)
    elif pa.types.is_struct(field.type):
        present = values.drop_null()
        for index, child in enumerate(field.type):
            _check_nulls(present.field(index), child, f"{path}.{child.name}", place)


def _check_ids(rows: pa.Table, table: Table, place: RowPlace) -> None:
    names = list(zip(*(rows.column(name).to_pylist() for name in table.row_id), strict=True))
    num_repeated = len(names) - len(set(names))
    if num_repeated:
        doubled = dict(zip(table.row_id, Counter(names).most_common(1)[0][0], strict=True))
        what = f"{num_repeated} rows repeat the id of another row of the slice"
        raise InvariantBreach(what, f"{place}, column {table.row_id[0]!r}, row {doubled}", _SAFE, _DO)


def _check_lengths(rows: pa.Table, table: Table, place: RowPlace) -> None:
    if not table.aligned:
        return
    first = table.aligned[0]
    wanted = _lengths(rows, first)
    for name in (*table.aligned[1:], *table.aligned_or_empty):
        found = _lengths(rows, name)
        wrong = found != wanted
        if name in table.aligned_or_empty:
            wrong &= found != 0
        if wrong.any():
            row = int(wrong.argmax())
            what = f"{name!r} has {found[row]} values where {first!r} has {wanted[row]}"
            raise _breach(what, rows, table, name, row, place)


def _value_rules(rows: pa.Table, table: Table) -> Iterator[tuple[str, Any, str]]:
    """Yield each rule on the values of a list column: the column, which of its flattened values break it, the rule."""
    for field in rows.schema:
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type):
            yield field.name, ~np.isfinite(_flat(rows, field.name)), "not finite"
    for name in table.logprobs:
        yield name, _flat(rows, name) > 0, "a log-prob above zero"
    for flags, allowed in table.only_where:
        may = np.repeat(rows.column(allowed).to_numpy(), _lengths(rows, flags))
        yield flags, _flat(rows, flags) & ~may, f"set although {allowed!r} is false"


def _lengths(rows: pa.Table, name: str) -> Any:
    return pc.list_value_length(rows.column(name)).to_numpy()


def _flat(rows: pa.Table, name: str) -> Any:
    return pc.list_flatten(rows.column(name)).to_numpy()


def _breach(what: str, rows: pa.Table, table: Table, name: str, row: int, place: RowPlace) -> InvariantBreach:
    identity = rows.select(table.row_id).slice(row, 1).to_pylist()[0]
    return InvariantBreach(what, f"{place}, column {name!r}, row {identity}", _SAFE, _DO)
