"""Ragged columns: the lists of an Arrow column as one flat numpy array and the borders of its rows.

A step holds millions of tokens in thousands of lists; everything that touches tokens works on the flat array, never on
one Python object per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths: row `i` is `values[offsets[i]:offsets[i + 1]]`."""

    values: npt.NDArray[Any]
    """All rows, one after the other; shape [total]."""
    offsets: Integers
    """Borders of the rows; shape [rows + 1], first 0, last `total`."""

    @classmethod
    def of(cls, column: "pa.ChunkedArray[Any]") -> "Ragged":
        """Return a list column without nulls as flat values and borders."""
        array = cast("pa.ListArray[Any]", column.combine_chunks())
        # The borders of a sliced column do not begin at 0, while `flatten` gives the values of the slice alone.
        offsets = np.asarray(array.offsets.to_numpy(zero_copy_only=False), np.int64)
        return cls(array.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0])

    @classmethod
    def from_lengths(cls, values: npt.NDArray[Any], lengths: npt.ArrayLike) -> "Ragged":
        """Return `values` cut into rows of these lengths, which must add up to its size."""
        offsets = borders(lengths)
        assert offsets[-1] == len(values), f"lengths add up to {offsets[-1]}, but there are {len(values)} values"
        return cls(values, offsets)

    @property
    def lengths(self) -> Integers:
        """Length of each row; shape [rows]."""
        return np.diff(self.offsets)

    @property
    def row_of_value(self) -> Integers:
        """The row that each value belongs to; shape [total]."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.lengths)

    def copy(self) -> "Ragged":
        """Return the same rows in arrays of their own."""
        return Ragged(self.values.copy(), self.offsets.copy())

    def take(self, rows: npt.ArrayLike) -> "Ragged":
        """Return these rows in this order; a row may be taken more than once."""
        where, offsets = places(self.offsets, rows)
        return Ragged(self.values[where], offsets)

    def merge(self, counts: npt.ArrayLike) -> "Ragged":
        """Return longer rows: each joins the next `counts[i]` rows; the counts add up to the number of rows."""
        return Ragged(self.values, self.offsets[borders(counts)])

    def arrow(self, kind: "pa.ListType[Any]") -> "pa.ListArray[Any]":
        """Return the rows as an Arrow list array of exactly this type."""
        values: Any = pa.array(self.values, type=kind.value_type)
        # Arrow's ordinary lists have borders of 32 bits: two thousand million tokens in one table.
        offsets: Any = pa.array(self.offsets, pa.int32())
        return cast("pa.ListArray[Any]", pa.ListArray.from_arrays(offsets, values, type=kind))


def borders(lengths: npt.ArrayLike) -> Integers:
    """Return 0 and the running sum of `lengths`; shape [rows + 1]."""
    sums: Integers = np.concatenate(([0], np.cumsum(np.asarray(lengths, np.int64), dtype=np.int64)))
    return sums


def places(offsets: Integers, rows: npt.ArrayLike) -> tuple[Integers, Integers]:
    """Return where the values of these rows lie, row after row, and the borders of the rows so taken.

    Streams with the same borders are taken with one such index.
    """
    chosen = np.asarray(rows, np.int64)
    lengths = np.diff(offsets)[chosen]
    taken = borders(lengths)
    where: Integers = np.arange(taken[-1])
    # Counts on within a row; at each border it jumps to where the next chosen row begins.
    where += np.repeat(offsets[:-1][chosen] - taken[:-1], lengths)
    return where, taken


def lists(rows: Sequence[Sequence[int]]) -> Ragged:
    """Return a list of lists of integers as a ragged array."""
    flat = np.fromiter((value for row in rows for value in row), np.int64)
    return Ragged.from_lengths(flat, [len(row) for row in rows])
