"""Every table comes back as it was written, whatever its rows."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.schemas.contract import Table
from storage.schemas.stage_tables import STAGE_TABLES
from storage.store import Store, open_store
from tests.fixtures.rows import entry, messages, random_rows


@pytest.mark.parametrize("table", STAGE_TABLES, ids=lambda table: table.name)
@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_rows_of_any_table_come_back_equal(table: Table, data: st.DataObject) -> None:
    rows = data.draw(random_rows(table))
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(Path(directory, "a store"))
        piece = store.append(table.name, rows, run="run", step=3, key="key", attempt="one")
        again = open_store(Path(directory, "a store")).read([piece])
    assert again.schema.equals(table.arrow)
    assert again.equals(rows)
    assert piece.rows == rows.num_rows
    assert len(piece.files) == min(1, rows.num_rows)


def test_slices_come_in_the_order_given_and_columns_are_chosen(store: Store) -> None:
    first = store.append("messages", messages(2), run="run", step=0, key="a", attempt="a")
    second = store.append("messages", messages(3), run="run", step=0, key="b", attempt="b")
    rows = store.read([second, first, second], ["message"])
    assert rows.column_names == ["message"]
    assert rows["message"].to_pylist() == [0, 1, 2, 0, 1, 0, 1, 2]


def test_one_attempt_may_append_more_than_once(store: Store) -> None:
    pieces = [store.append("messages", messages(n), run="run", step=0, key="k", attempt="same") for n in (1, 2, 3)]
    assert [piece.attempt for piece in pieces] == ["same", "same.1", "same.2"]
    assert [store.read([piece]).num_rows for piece in pieces] == [1, 2, 3]


def test_chunks_and_offsets_of_what_is_written_do_not_matter(store: Store) -> None:
    rows = pa.concat_tables([messages(6).slice(0, 2), messages(6).slice(2, 3), messages(6).slice(5)])
    chunked = store.append("messages", rows, run="run", step=0, key="k", attempt="a")
    whole = store.append("messages", messages(6), run="run", step=0, key="k", attempt="b")
    assert chunked.digest == whole.digest
    assert store.read([chunked]).equals(messages(6))


def test_scan_sees_what_the_ledger_names_and_nothing_else(store: Store) -> None:
    assert store.scan("messages").collect().height == 0
    named = store.append("messages", messages(3), run="run", step=7, key="k", attempt="named")
    store.append("messages", messages(4), run="run", step=7, key="k", attempt="orphan")
    assert store.scan("messages").collect().height == 0
    store.ledger.commit(entry("k", outputs=(named,)))
    store.ledger.commit(entry("k", run="branch", outputs=(named,)))
    found = store.scan("messages").sort("seq").collect()
    assert found.columns == ["run", "step", "key", "attempt", "seq", *messages().column_names]
    assert found.select("run", "step", "key", "attempt", "seq").rows() == [
        ("run", 7, "k", "named", n) for n in range(3)
    ]
    assert found["token_ids"].to_list() == messages(3)["token_ids"].to_pylist()
