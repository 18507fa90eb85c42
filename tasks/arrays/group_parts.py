"""Parts of a step with whole groups: what compares the members of groups alone need not hold all of them at once."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import codes
from tasks.arrays.ragged import Integers
from tasks.runtime.stored_rows import PART_BYTES, StoredRows


def group_parts(
    traces: pa.Table, messages: StoredRows, most_bytes: int = PART_BYTES, columns: Sequence[str] | None = None
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield consecutive traces with all their messages, no group in two parts; all of them in one if that must be.

    A part is cut as soon as its messages have so many bytes, of some columns or of all. Messages of unknown traces go
    with any part.
    """
    if messages.num_parts <= 1:
        yield traces, messages.table(columns)
        return
    first, last = _trace_bounds(traces, messages)
    borders = _group_borders(traces)
    # What comes later begins behind what came before: only there a part may end.
    ends, starts = np.maximum.accumulate(last) + 1, np.minimum.accumulate(first[::-1])[::-1]
    begin, held, size = 0, list[pa.Table](), 0
    for number, part in enumerate(messages.parts(columns)):
        held.append(part)
        size += part.nbytes
        if size < most_bytes or number + 1 == messages.num_parts:
            continue
        end = int(borders[np.searchsorted(borders, ends[number])])
        if end <= starts[number + 1]:
            yield traces.slice(begin, end - begin), pa.concat_tables(held)
            begin, held, size = end, [], 0
    yield traces.slice(begin), pa.concat_tables(held)


def _trace_bounds(traces: pa.Table, messages: StoredRows) -> tuple[Integers, Integers]:
    """Return the first and the last row of traces that each part of messages is of; of none, behind all and -1."""
    known = traces["trace_id"].combine_chunks()
    first, last = np.full(messages.num_parts, traces.num_rows), np.full(messages.num_parts, -1)
    for number, part in enumerate(messages.parts(["trace_id"])):
        rows = pc.index_in(part["trace_id"], value_set=known).drop_null().to_numpy()
        if len(rows):
            first[number], last[number] = rows.min(), rows.max()
    return first, last


def _group_borders(traces: pa.Table) -> Integers:
    """Return the rows before which no group has begun that goes on there, the end included."""
    code, names = codes(traces["group_id"])
    rows = np.arange(len(code))
    first, last = np.full(len(names), len(code)), np.zeros(len(names), np.int64)
    np.minimum.at(first, code, rows)
    np.maximum.at(last, code, rows)
    open_groups = np.zeros(len(code) + 1, np.int64)
    np.add.at(open_groups, first + 1, 1)
    np.add.at(open_groups, last + 1, -1)
    borders: Integers = np.flatnonzero(np.cumsum(open_groups) == 0)
    return borders
