"""Columns or rows that break the contract are refused before anything is written, by a message that says where."""

import pyarrow as pa
import pytest

from storage.errors import InvariantBreach, SchemaError, StoreError
from storage.schemas.contract import read_tables
from storage.schemas.stage_tables import STAGE_TABLES, TABLES
from tests.fixtures.commands import cases
from tests.fixtures.rows import messages

SCHEMA = TABLES["messages"].arrow


def append(store, rows, table="messages"):
    store.append(table, rows, run="run-a", step=5, key="the-key", attempt="attempt")


def refused(store, rows, kind, words):
    """Assert that rows are refused by an error that names their work, and not written; return the error."""
    with pytest.raises(kind, match=words) as caught:
        append(store, rows)
    assert "run 'run-a', step 5, table 'messages', key 'the-key'" in caught.value.where
    assert store.slices.table("messages").active_files() == []
    return caught.value


def changed(**columns):
    rows = messages(2)
    for name, values in columns.items():
        field = SCHEMA.field(name)
        rows = rows.set_column(SCHEMA.get_field_index(name), field, pa.array(values, field.type))
    return rows


def retyped(name, kind, nullable=False):
    rows = messages(2)
    place = SCHEMA.get_field_index(name)
    return rows.set_column(place, pa.field(name, kind, nullable), rows[name].cast(kind))


TEXT = """-- a row
create table names (
    name varchar,  -- its name
    nodes integer[] null,  -- its nodes,
        -- in order
    primary key (name)
);
"""


def test_a_table_is_read_from_its_statement(tmp_path):
    (tmp_path / "a.sql").write_text(TEXT)
    (table,) = read_tables(str(tmp_path / "a.sql"))
    assert (table.name, table.row, table.row_id) == ("names", "a row", ("name",))
    assert [(column.name, column.meaning) for column in table.columns] == [
        ("name", "its name"),
        ("nodes", "its nodes, in order"),
    ]


@cases(__file__, "lines")
def test_a_line_that_is_not_read_is_no_table_with_a_column_less(tmp_path, line, wrong):
    (tmp_path / "a.sql").write_text(TEXT.replace(line, wrong))
    with pytest.raises(AssertionError, match="not of the form"):
        read_tables(str(tmp_path / "a.sql"))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (messages().drop_columns(["role"]), "missing: .*role"),
        (messages().append_column("more", pa.array([1] * 4)), "unexpected: .*more"),
        (messages().select(SCHEMA.names[::-1]), "another order"),
        (retyped("message", pa.int64()), "unexpected: .*message: int64"),
        (retyped("message", pa.float64()), "unexpected: .*message: double"),
        (retyped("role", pa.large_string()), "unexpected"),
        (retyped("role", pa.string(), nullable=True), "unexpected"),
        (retyped("token_ids", pa.list_(pa.int32())), "unexpected"),
    ],
)
def test_columns_must_be_exactly_the_contract_s(store, rows, words):
    refused(store, rows, SchemaError, words)


def test_a_null_where_none_may_be_is_refused(store):
    refused(store, changed(role=["user", None]), SchemaError, "'role' holds a null at 1")
    nulls = changed(token_ids=[[1, 2, 3], [4, None, 6]])
    refused(store, nulls, SchemaError, r"'token_ids\.element' holds a null at 4")


@cases(__file__, "contradictions")
def test_a_row_that_contradicts_itself_is_refused(store, columns, words, column):
    error = refused(store, changed(**columns), InvariantBreach, words)
    assert f"column '{column}', row {{'trace_id': 'trace', 'message': 1}}" in error.where
    assert error.safe and error.do


def test_what_is_allowed_at_the_border_is_allowed(store):
    append(store, changed(logprobs=[[-0.0, 0.0, -3e38], [-1e-45, 0, 0]], is_content=[[True] * 3, []]))


def test_a_row_id_is_not_repeated(store):
    error = refused(store, changed(message=[7, 7]), InvariantBreach, "1 rows repeat")
    assert "{'trace_id': 'trace', 'message': 7}" in error.where


@pytest.mark.parametrize("run", ["", "a/b", "..", ".hidden", "a b", "run=x"])
def test_a_run_s_name_is_a_name(store, run):
    with pytest.raises(StoreError, match="cannot name a run"):
        store.append("messages", messages(), run=run, step=0, key="k", attempt="a")


def test_only_stage_tables_take_slices(store):
    for name in ("ledger", "runs", "nothing"):
        with pytest.raises(SchemaError, match="no stage table"):
            append(store, messages(), name)


def test_what_the_contract_says_of_columns_names_columns_that_are_there():
    for table in STAGE_TABLES:
        flags = dict(table.only_where)
        lists = {column.name for column in table.columns if pa.types.is_list(column.type)}
        assert lists >= {*table.aligned, *table.aligned_or_empty, *table.logprobs, *flags}
        assert {column.name for column in table.columns} >= {*table.row_id, *flags.values()}
