"""Ragged columns: the same rows as Python lists would hold."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from storage.schemas.contract import INDICES
from tasks.arrays.ragged import Ragged, lists

ROWS = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8)


def rows_of(ragged):
    return [ragged.values[a:b].tolist() for a, b in zip(ragged.offsets[:-1], ragged.offsets[1:], strict=True)]


@given(rows=ROWS)
def test_arrow_there_and_back(rows):
    column = pa.chunked_array([pa.array(rows, INDICES)])
    ragged = Ragged.of(column)
    assert rows_of(ragged) == rows_of(lists(rows)) == rows
    assert ragged.arrow(INDICES).equals(column.combine_chunks())
    assert ragged.arrow(INDICES).type == INDICES


@given(rows=ROWS, cut=st.integers(0, 8))
def test_slices_and_chunks_of_a_column_read_the_same(rows, cut):
    array = pa.array(rows, INDICES)
    assert rows_of(Ragged.of(pa.chunked_array([array.slice(0, cut), array.slice(cut)]))) == rows
    assert rows_of(Ragged.of(pa.chunked_array([array.slice(cut)]))) == rows[cut:]


@given(rows=ROWS.filter(len), data=st.data())
def test_take_picks_rows_in_any_order(rows, data):
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12))
    assert rows_of(lists(rows).take(chosen)) == [rows[i] for i in chosen]


def test_merge_joins_neighbours():
    assert rows_of(lists([[1], [2, 3], [], [4]]).merge([2, 0, 2])) == [[1, 2, 3], [], [4]]


def test_row_of_value():
    assert lists([[1], [], [2, 3]]).row_of_value.tolist() == [0, 2, 2]
