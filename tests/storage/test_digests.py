"""The digest follows values, and only values."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from storage.delta.parquet import decode, encode
from storage.schemas.stage_tables import MESSAGES
from storage.schemas.system_tables import FILE
from storage.slices import content_digest
from tests.fixtures.rows import messages, random_rows


def test_golden() -> None:
    rows = pa.table(
        {
            "text": ["a", None, ""],
            "lists": pa.array([[1, 2], [], [3]], pa.list_(pa.int32())),
            "flags": [True, False, None],
            "files": pa.array([[{"path": "x", "size": 1, "sha256": "y"}], [], []], pa.list_(FILE)),
        }
    )
    assert content_digest(rows) == "843bbc892dcc4cb2c68c3cbda4e3f6785164a3176c26d8c1316fcedbd3e2ca3c"


@given(random_rows(MESSAGES, 5), st.integers(0, 5), st.integers(1, 3))
def test_chunks_slices_and_encoding_do_not_change_it(rows: pa.Table, start: int, size: int) -> None:
    part = rows.slice(min(start, max(0, rows.num_rows - 1)))
    chunked = pa.Table.from_batches(part.to_batches(max_chunksize=size), rows.schema)
    rebuilt = pa.Table.from_pylist(part.to_pylist(), rows.schema)
    decoded = decode(pa.BufferReader(encode([part])), rows.schema) if part.num_rows else part
    assert content_digest(part) == content_digest(chunked) == content_digest(rebuilt) == content_digest(decoded)


def test_what_lies_under_a_null_does_not_count() -> None:
    plain = pa.table({"a": pa.array([1, None], pa.int64())})
    hidden = pa.Array.from_buffers(
        pa.int64(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(b"\x01" + b"\0" * 7 + b"\x07" * 8)]
    )
    assert content_digest(pa.table({"a": hidden})) == content_digest(plain)


def test_every_difference_counts() -> None:
    def of(values: list[object], kind: pa.DataType, name: str = "a") -> str:
        return content_digest(pa.table({name: pa.array(values, kind)}))

    digests = [
        of([], pa.string()),
        of([None], pa.string()),
        of([""], pa.string()),
        of(["", ""], pa.string()),
        of(["ab", "c"], pa.string()),
        of(["a", "bc"], pa.string()),
        of([None, "abc"], pa.string()),
        of(["abc", None], pa.string()),
        of(["abc", None], pa.string(), "b"),
        of([[1], [2]], pa.list_(pa.int32())),
        of([[1, 2], []], pa.list_(pa.int32())),
        of([[], [1, 2]], pa.list_(pa.int32())),
        of([[1, 2]], pa.list_(pa.int32())),
        of([[1, 2]], pa.list_(pa.int64())),
        of([0.0], pa.float64()),
        of([-0.0], pa.float64()),
        of([0.0], pa.float32()),
        of([0], pa.int64()),
        of([False], pa.bool_()),
        of([True], pa.bool_()),
        content_digest(messages(3)),
        content_digest(messages(3).take([1, 0, 2])),
    ]
    assert len(set(digests)) == len(digests)
