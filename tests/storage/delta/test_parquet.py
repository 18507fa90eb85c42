"""Damaged Parquet files: an error or other rows, which digests tell, and never the end of the process."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.delta.parquet import buffer_reader, decode, encode
from storage.errors import SchemaError, StoreUnavailable
from tests.fixtures.faults import happened

SCHEMA = pa.schema([pa.field("attempt", pa.string(), False), pa.field("seq", pa.int64(), False)])


def rows_of(attempt):
    return pa.table({"attempt": [attempt] * 2, "seq": [0, 1]}, schema=SCHEMA)


def test_rows_of_chosen_attempts_come_from_their_row_groups():
    data = encode([rows_of(f"attempt-{number}") for number in range(4)])
    assert decode(buffer_reader(data), SCHEMA, {"attempt-2"}).equals(rows_of("attempt-2"))
    assert decode(buffer_reader(data), SCHEMA, {"other"}).num_rows == 0
    assert decode(buffer_reader(data), SCHEMA).num_rows == 8


def test_a_file_that_does_not_say_its_attempts_is_read_whole():
    sink = pa.BufferOutputStream()
    pq.write_table(pa.concat_tables([rows_of("a"), rows_of("b")]), sink, store_schema=False)
    assert decode(pa.BufferReader(sink.getvalue()), SCHEMA, {"b"}).equals(rows_of("b"))


@pytest.mark.fault(
    "files", "each bit of a Parquet footer is flipped in turn", "an error or rows, and the process lives"
)
@pytest.mark.parametrize("bit", range(8))
def test_no_flipped_bit_of_a_footer_ends_the_process(bit):
    good = encode([rows_of(f"attempt-{number}") for number in range(3)])
    first = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    read = 0
    for place in range(first, len(good)):
        data = bytearray(good)
        data[place] ^= 1 << bit
        try:
            decode(buffer_reader(bytes(data)), SCHEMA, {"attempt-1"})
            read += 1
        except (StoreUnavailable, SchemaError):
            pass
    happened(f"{len(good) - first} bits")
    assert 0 < read < len(good) - first
