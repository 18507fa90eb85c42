"""Arrow string columns as Python lists, as numpy codes of their distinct values, and as what chooses rows."""

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.ragged import Integers


def texts(column: "pa.ChunkedArray[Any]") -> list[str]:
    """Return a string column without nulls as a list."""
    return cast(list[str], column.to_pylist())


def codes(column: "pa.ChunkedArray[Any]") -> tuple[Integers, list[str]]:
    """Return a string column as numbers of its distinct values, in order of appearance, and those values."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), cast(list[str], encoded.dictionary.to_pylist())


def rows_with(rows: pa.Table, column: str, values: "pa.ChunkedArray[Any] | Iterable[str]") -> pa.Table:
    """Return the rows that have one of some values in a string column, in order."""
    return rows.filter(_is_in(rows, column, values))


def rows_without(rows: pa.Table, column: str, values: "pa.ChunkedArray[Any] | Iterable[str]") -> pa.Table:
    """Return the other rows, in order."""
    return rows.filter(pc.invert(_is_in(rows, column, values)))


def _is_in(rows: pa.Table, column: str, values: "pa.ChunkedArray[Any] | Iterable[str]") -> Any:
    chosen: Any = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else pa.array(values, pa.string())
    return pc.is_in(rows[column], value_set=chosen)


def with_column(rows: pa.Table, name: str, values: Any) -> pa.Table:
    """Return the rows with other values in one of their columns."""
    index = rows.schema.get_field_index(name)
    return rows.set_column(index, rows.schema.field(index), values)
