"""Columns or rows that break the contract are refused before anything is written, by a message that says where."""

import math

import pyarrow as pa
import pytest

from storage.errors import InvariantBreach, SchemaError, StoreError
from storage.schemas import stage_tables
from storage.schemas.contract import read_tables
from storage.schemas.stage_tables import STAGE_TABLES, TABLES
from tests.fixtures.rows import messages

SCHEMA = TABLES["messages"].arrow


def append(store, rows, table="messages"):
    store.append(table, rows, run="run-a", step=5, key="the-key", attempt="attempt")


def changed(**columns):
    rows = messages(2)
    for name, values in columns.items():
        rows = rows.set_column(
            SCHEMA.get_field_index(name), SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type)
        )
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


@pytest.mark.parametrize("table", STAGE_TABLES, ids=lambda table: table.name)
def test_the_constant_of_a_table_is_called_after_it(table):
    assert getattr(stage_tables, table.name.upper()) is table


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("name varchar,  --", "name varchar, --"),
        ("integer[] null,", "integer[] not null,"),
        ("    nodes", "  nodes"),
        ("-- a row\n", ""),
        ("primary key (name)", "primary key (name),"),
    ],
)
def test_a_line_that_is_not_read_is_no_table_with_a_column_less(tmp_path, line, wrong):
    (tmp_path / "a.sql").write_text(TEXT.replace(line, wrong))
    with pytest.raises(AssertionError, match="not of the form"):
        read_tables(str(tmp_path / "a.sql"))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (messages().drop_columns(["role"]), "missing: role"),
        (messages().append_column("more", pa.array([1] * 4)), "unexpected: more"),
        (messages().select(SCHEMA.names[::-1]), "another order"),
        (retyped("message", pa.int64()), "different: .*message: int64"),
        (retyped("message", pa.float64()), "different: .*message: double"),
        (retyped("role", pa.large_string()), "different"),
        (retyped("role", pa.string(), nullable=True), "different"),
        (retyped("token_ids", pa.list_(pa.int32())), "different"),
    ],
)
def test_columns_must_be_exactly_the_contract_s(store, rows, words):
    with pytest.raises(SchemaError, match=words) as caught:
        append(store, rows)
    assert "run 'run-a', step 5, table 'messages', key 'the-key'" in caught.value.where
    assert store.slices.table("messages").active_files() == []


def test_a_null_where_none_may_be_is_refused(store):
    with pytest.raises(SchemaError, match="'role' holds a null at 1"):
        append(store, changed(role=["user", None]))
    with pytest.raises(SchemaError, match=r"'token_ids\.element' holds a null at 4"):
        append(store, changed(token_ids=[[1, 2, 3], [4, None, 6]]))


@pytest.mark.parametrize(
    ("columns", "words", "column"),
    [
        ({"mask": [[False] * 3, [True] * 2]}, "'mask' has 2 values where 'token_ids' has 3", "mask"),
        ({"is_content": [[], [True]]}, "'is_content' has 1 values where 'token_ids' has 3", "is_content"),
        ({"logprobs": [[0, 0, 0], [0, -1, 0.25]]}, "holds 0.25 at position 2: a log-prob above zero", "logprobs"),
        ({"logprobs": [[0, 0, 0], [0, math.nan, 0]]}, "holds nan at position 1: not finite", "logprobs"),
        ({"logprobs": [[0, 0, 0], [-math.inf, 0, 0]]}, "holds -inf at position 0: not finite", "logprobs"),
        ({"mask": [[False] * 3, [True] * 3], "sampled": [True, False]}, "although 'sampled' is false", "mask"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(store, columns, words, column):
    with pytest.raises(InvariantBreach, match=words) as caught:
        append(store, changed(**columns))
    assert "run 'run-a', step 5, table 'messages', key 'the-key'" in caught.value.where
    assert f"column '{column}', row {{'trace_id': 'trace', 'message': 1}}" in caught.value.where
    assert caught.value.safe
    assert caught.value.do
    assert store.slices.table("messages").active_files() == []


def test_what_is_allowed_at_the_border_is_allowed(store):
    append(store, changed(logprobs=[[-0.0, 0.0, -3e38], [-1e-45, 0, 0]], is_content=[[True] * 3, []]))


def test_a_row_id_is_not_repeated(store):
    with pytest.raises(InvariantBreach, match="1 rows repeat") as caught:
        append(store, changed(message=[7, 7]))
    assert "{'trace_id': 'trace', 'message': 7}" in caught.value.where


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
        lists = {c.name for c in table.columns if pa.types.is_list(c.type)}
        assert lists >= {
            *table.aligned,
            *table.aligned_or_empty,
            *table.logprobs,
            *(pair[0] for pair in table.only_where),
        }
        assert {c.name for c in table.columns} >= {*table.row_id, *(pair[1] for pair in table.only_where)}
