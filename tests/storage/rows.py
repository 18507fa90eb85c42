"""Rows for storage tests: random ones out of the contract itself, and small fixed ones."""

import string
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from storage.refs import Entry, Slice
from storage.schemas.columns import Table
from storage.schemas.stage_tables import TABLES

MOMENT = datetime(2026, 11, 21, 12, 0, 0, 123456, tzinfo=UTC)


def messages(count: int = 4, length: int = 3) -> pa.Table:
    """A few rows of the messages table, every second one sampled."""
    rows = [
        {
            "trace_id": "trace",
            "message": number,
            "parent": number - 1 if number else None,
            "role": "assistant" if number % 2 else "user",
            "content": f"héllo {number}",
            "body": "{}",
            "sampled": number % 2 == 1,
            "token_ids": [number * 100 + token for token in range(length)],
            "mask": [number % 2 == 1] * length,
            "is_content": [],
            "logprobs": [-0.5 * token for token in range(length)],
        }
        for number in range(count)
    ]
    return pa.Table.from_pylist(rows, TABLES["messages"].arrow)


def entry(key: str = "key", run: str = "run", part: str = "", outputs: tuple[Slice, ...] = (), **others: Any) -> Entry:
    """A ledger row with little in it."""
    given = {"attempt": "attempt", "started_at": MOMENT, "finished_at": MOMENT, "stage": "rollout", "step": 0}
    inputs = {"assignment": "upstream"}
    return Entry(
        **{**given, **others}, run=run, key=key, part=part, stage_version=1, section={"x": 1.5}, inputs=inputs,
        outputs=outputs,
    )  # fmt: skip


def random_rows(table: Table, max_rows: int = 6) -> st.SearchStrategy[pa.Table]:
    """Tables of random rows that the contract allows, row ids distinct."""
    return st.lists(_row(table), max_size=max_rows).map(lambda rows: _distinct(table, rows))


@st.composite
def _row(draw: st.DrawFn, table: Table) -> dict[str, Any]:
    length = draw(st.integers(0, 5))
    row = {}
    for column in table.columns:
        if column.nullable and draw(st.booleans()):
            row[column.name] = None
        elif column.name in table.aligned:
            row[column.name] = draw(_list(column.type, length, column.name in table.logprobs))
        elif column.name in table.aligned_or_empty:
            row[column.name] = draw(_list(column.type, draw(st.sampled_from([0, length])), False))
        elif column.name in table.logprobs:
            row[column.name] = draw(_list(column.type, length, True))
        else:
            row[column.name] = draw(_value(column.type))
    for flags, allowed in table.only_where:
        row[flags] = [flag and row[allowed] for flag in row[flags]]
    return row


def _list(kind: pa.ListType, length: int, negative: bool) -> st.SearchStrategy[list[Any]]:
    values = st.floats(max_value=0, width=32, allow_infinity=False) if negative else _element(kind.value_type)
    return st.lists(values, min_size=length, max_size=length)


def _element(kind: pa.DataType) -> st.SearchStrategy[Any]:
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return finite if pa.types.is_floating(kind) else _value(kind)


def _value(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_list(kind):
        return st.lists(_element(kind.value_type), max_size=4)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({field.name: _value(field.type) for field in kind})
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_integer(kind):
        return st.integers(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1)
    if pa.types.is_floating(kind):
        return st.floats(width=kind.bit_width, allow_nan=False)
    if pa.types.is_binary(kind):
        return st.binary(max_size=12)
    if pa.types.is_timestamp(kind):
        return st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
    assert pa.types.is_string(kind), kind
    return st.one_of(st.text(string.printable + "é漢🎉\x00", max_size=12), st.just(""))


def _distinct(table: Table, rows: list[dict[str, Any]]) -> pa.Table:
    by_id = {tuple(row[name] for name in table.row_id): row for row in rows}
    return pa.Table.from_pylist(list(by_id.values()), table.arrow)
