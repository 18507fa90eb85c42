"""Slices: every table comes back as it was written, whatever its rows, or it is said that its bytes are others.

The digest follows values, and only values.
"""

import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.delta.parquet import decode, encode
from storage.errors import DamagedSlice, StoreUnavailable
from storage.schemas.contract import FILE
from storage.schemas.stage_tables import MESSAGES, STAGE_TABLES
from storage.slices import content_digest
from storage.store import open_store
from tests.fixtures.rows import append, entry, messages, random_rows


def test_golden():
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
def test_chunks_slices_and_encoding_do_not_change_it(rows, start, size):
    part = rows.slice(min(start, max(0, rows.num_rows - 1)))
    chunked = pa.Table.from_batches(part.to_batches(max_chunksize=size), rows.schema)
    rebuilt = pa.Table.from_pylist(part.to_pylist(), rows.schema)
    decoded = decode(pa.BufferReader(encode([part])), rows.schema) if part.num_rows else part
    assert content_digest(part) == content_digest(chunked) == content_digest(rebuilt) == content_digest(decoded)


def test_what_lies_under_a_null_does_not_count():
    plain = pa.table({"a": pa.array([1, None], pa.int64())})
    hidden = pa.Array.from_buffers(
        pa.int64(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(b"\x01" + b"\0" * 7 + b"\x07" * 8)]
    )
    assert content_digest(pa.table({"a": hidden})) == content_digest(plain)


def test_every_difference_counts():
    def of(values, kind, name="a"):
        return content_digest(pa.table({name: pa.array(values, kind)}))

    texts = [], [None], [""], ["", ""], ["ab", "c"], ["a", "bc"], [None, "abc"], ["abc", None]
    lists = [[1], [2]], [[1, 2], []], [[], [1, 2]], [[1, 2]]
    digests = [
        *(of(values, pa.string()) for values in texts),
        of(texts[-1], pa.string(), "b"),
        *(of(values, pa.list_(pa.int32())) for values in lists),
        of(lists[-1], pa.list_(pa.int64())),
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


@pytest.mark.parametrize("table", STAGE_TABLES, ids=lambda table: table.name)
@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_rows_of_any_table_come_back_equal(table, data):
    rows = data.draw(random_rows(table))
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(Path(directory, "a store"))
        piece = store.append(table.name, rows, run="run", step=3, key="key", attempt="one")
        again = open_store(Path(directory, "a store")).read([piece])
    assert again.schema.equals(table.arrow)
    assert again.equals(rows)
    assert piece.rows == rows.num_rows
    assert len(piece.files) == min(1, rows.num_rows)


def test_slices_come_in_the_order_given_and_columns_are_chosen(store):
    first = append(store, 2, key="a")
    second = append(store, 3, key="b", attempt="b")
    rows = store.read([second, first, second], ["message"])
    assert rows.column_names == ["message"]
    assert rows["message"].to_pylist() == [0, 1, 2, 0, 1, 0, 1, 2]


def test_one_attempt_may_append_more_than_once(store):
    pieces = [append(store, n, attempt="same") for n in (1, 2, 3)]
    assert [piece.attempt for piece in pieces] == ["same", "same.1", "same.2"]
    assert [store.read([piece]).num_rows for piece in pieces] == [1, 2, 3]


def test_a_first_commit_makes_no_log_in_place_of_one_that_is_gone(root, store):
    place = root / "tables/messages"
    written = store.slices.write("messages", messages(2), run="run", step=0, key="k", attempt="a")
    shutil.rmtree(place)
    with pytest.raises(StoreUnavailable, match="the log of table 'messages' is gone"):
        store.slices.commit("messages", [written])
    assert not list(place.glob("_delta_log/*"))
    append(open_store(root), 2)  # a process that begins now makes the table again


def test_scan_sees_what_the_ledger_names_and_nothing_else(store):
    assert store.scan("messages").collect().height == 0
    named = append(store, 3, step=7, attempt="named")
    append(store, 4, step=7, attempt="orphan")
    assert store.scan("messages").collect().height == 0
    store.ledger.commit(entry("k", outputs=(named,)))
    store.ledger.commit(entry("k", run="branch", outputs=(named,)))
    found = store.scan("messages").sort("seq").collect()
    assert found.columns == ["run", "step", "key", "attempt", "seq", *messages().column_names]
    assert found.select("run", "step", "key", "attempt", "seq").rows() == [
        ("run", 7, "k", "named", n) for n in range(3)
    ]
    assert found["token_ids"].to_list() == messages(3)["token_ids"].to_pylist()


@pytest.fixture
def piece(store):
    piece = append(store, 20, 50, step=2)
    store.ledger.commit(entry("k", outputs=(piece,)))
    return piece


@pytest.fixture
def file(root, piece):
    return root / "tables/messages" / piece.files[0].path


def flip_bits(file, times):
    """Flip one bit of a file after the other, each in the file as it was, which it is again in the end."""
    good, chance = file.read_bytes(), random.Random(4)
    for bit in (chance.randrange(len(good) * 8) for _ in range(times)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        yield bit
    file.write_bytes(good)


@pytest.mark.engine
def test_any_flipped_bit_is_found(root, piece, file):
    for _ in flip_bits(file, 150):
        with pytest.raises(DamagedSlice, match="SHA-256") as caught:
            open_store(root).read([piece])
        assert "table 'messages', run 'run', attempt 'a'" in caught.value.where
    assert open_store(root).read([piece]).equals(messages(20, 50))


@pytest.mark.parametrize("keep", [0, -1])
def test_a_truncated_file_is_found(root, piece, file, keep):
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DamagedSlice, match="bytes instead of"):
        open_store(root).read([piece])


@pytest.mark.parametrize(("change", "words"), [({"digest": "0"}, "digest differs"), ({"rows": 19}, "instead of 19")])
def test_the_error_of_damaged_rows_names_their_work(store, piece, change, words):
    with pytest.raises(DamagedSlice, match=words) as caught:
        store.read([replace(piece, **change)])
    assert caught.value.where == "table 'messages', run 'run', attempt 'a'"
