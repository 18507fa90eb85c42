"""Arrow string columns as Python lists, and as numpy codes of their distinct values."""

from typing import Any, cast

import numpy as np
import pyarrow as pa

from tasks.arrays.ragged import Integers


def texts(column: "pa.ChunkedArray[Any]") -> list[str]:
    """Return a string column without nulls as a list."""
    return cast(list[str], column.to_pylist())


def codes(column: "pa.ChunkedArray[Any]") -> tuple[Integers, list[str]]:
    """Return a string column as numbers of its distinct values, in order of appearance, and those values."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), cast(list[str], encoded.dictionary.to_pylist())
