"""Choosing among traces: every filter alone and together, every order, pages; against the plainest Python there is."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.queries.request import BadQuestion, PageRequest
from flows.queries.rollout_list import (
    COLUMNS,
    LARGEST_PAGE,
    OUTCOMES,
    RolloutColumn,
    TraceChoice,
    choice_of,
    choose,
    known_values,
    read_names,
    sort_rows,
)

COLUMNS_OF_ROWS = ("environment", "agent", "outcome", "reason", "reward", "detected", "group_id", "example_id")
ROWS: list[dict[str, Any]] = [
    dict(zip(COLUMNS_OF_ROWS, row, strict=True)) | ({"error_class": "timeout"} if row[2] == "errored" else {})
    for row in [
        ("a", "x", "trained", None, 0.5, [], "0", "one"),
        ("a", "y", "trained", None, 0.5, ["long"], "0", "one"),
        ("b", "x", "filtered", "long", 1.0, ["long"], "1", "one"),
        ("b", "x", "filtered", "loud", -2.0, ["loud", "long"], "1", "one"),
        ("b", "y", "errored", None, None, ["errored"], "1", "one"),
        ("b", "y", "quarantined", "quarantined", None, None, "1", "one"),
        ("a", "x", "pending", None, 0.0, None, "1", "two"),
    ]
]
TEXTS = (
    *("environment", "agent", "outcome", "reason", "error_class"),
    *("group_id", "example_id", "trace_id", "key", "detail"),
)
FILTERS: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "environment": ("b", lambda row: row["environment"] == "b"),
    "agent": ("x", lambda row: row["agent"] == "x"),
    "outcome": ("filtered", lambda row: row["outcome"] == "filtered"),
    "filter": ("long", lambda row: "long" in (row["detected"] or []) or row["reason"] == "long"),
    "reason": ("long", lambda row: row["reason"] == "long"),
    "error": ("timeout", lambda row: row["error_class"] == "timeout"),
    "group": ("1", lambda row: row["group_id"] == "1"),
    "example": ("two", lambda row: row["example_id"] == "two"),
}


def frame(rows: list[dict[str, Any]] = ROWS) -> pl.DataFrame:
    """Rows as `step_traces.traces` has them, as far as they matter here."""
    usual = {name: None for name in TEXTS} | {"group_id": "1", "example_id": "one", "detail": ""}
    full = [usual | {"trace_id": f"t{n}", "reward": None, "detected": None} | row for n, row in enumerate(rows)]
    types = {**dict.fromkeys(TEXTS, pl.String), "reward": pl.Float64, "detected": pl.List(pl.String)}
    made = (
        pl.DataFrame(full, schema=types)
        .with_row_index("place")
        .with_columns(
            pl.col("place").cast(pl.Int64),
            trained=pl.col("outcome") == "trained",
            metrics=pl.lit("{}"),
            rewards=pl.lit("{}"),
        )
    )
    others = [each.name for each in COLUMNS if each.name not in made.columns]
    return made.with_columns(pl.lit(None, pl.Int64).alias(name) for name in others)


def ids(found: pl.DataFrame) -> list[str]:
    return found["trace_id"].to_list()


@pytest.mark.parametrize("names", [each for n in (1, 2, 3) for each in combinations(FILTERS, n)], ids="+".join)
def test_filters_alone_and_together(names):
    made = frame()
    found = choose(made, TraceChoice({name: FILTERS[name][0] for name in names}))
    expected = [row["trace_id"] for row in made.to_dicts() if all(FILTERS[name][1](row) for name in names)]
    assert ids(found.rows) == ids(found.page) == expected
    if len(names) == 1:
        assert 0 < len(expected) < len(ROWS)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (TraceChoice({"environment": "c"}), "environment='c' is not known here; there are a, b"),
        (TraceChoice({"outcome": "Trained"}), "outcome='Trained' is not known here; there are trained, filtered"),
        (TraceChoice({"filter": "short"}), "filter='short' is not known here; there are errored, long, loud"),
        (TraceChoice({"error": "gone"}), "error='gone' is not known here; there are infrastructure, timeout"),
        (TraceChoice(order="down"), "order='down' is not known here; there are asc, desc"),
        (TraceChoice({"group": "7"}), "group='7' is not known here"),
        (TraceChoice(sort="nothing"), "there is no column 'nothing'; there are trace_id, reward"),
        (TraceChoice(columns=("reward", "beauty")), "there is no column 'beauty'"),
        (TraceChoice(sort="metric:"), "there is no column 'metric:'"),
        (TraceChoice(page=2), "page=2: there are 1 of 50 traces each"),
        (TraceChoice(page=0), "page=0 of 50 traces: both count from 1"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(choice, said):
    with pytest.raises(BadQuestion) as caught:
        choose(frame(), choice)
    assert str(caught.value).startswith(said)


def test_an_outcome_or_error_that_none_has_here_is_an_answer():
    assert "refused" in OUTCOMES and ids(choose(frame(), TraceChoice({"outcome": "refused"})).rows) == []
    assert ids(choose(frame(), TraceChoice({"error": "infrastructure"})).rows) == []
    assert known_values(frame())["outcome"] == ["trained", "filtered", "errored", "quarantined", "pending"]


def slowly(rows: list[dict[str, Any]], name: str, descending: bool) -> list[int]:
    """The places of rows by a column: in either order what has no value comes last, and equals stay as they came."""

    def value(row: dict[str, Any]) -> Any:
        found = row[name]
        if isinstance(found, list):
            return ", ".join(found) or None
        return None if isinstance(found, float) and math.isnan(found) else found

    there = [row for row in rows if value(row) is not None]
    none = [row["place"] for row in rows if value(row) is None]
    return [row["place"] for row in sorted(there, key=value, reverse=descending)] + none


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "text": st.text(st.sampled_from("aB\u00e9\U0001f600 "), max_size=2),
    "number": st.sampled_from([0.0, 1.0, -1.5, math.nan, math.inf, 0.1]),
    "whole": st.integers(-2, 2),
    "flag": st.booleans(),
    "names": st.lists(st.sampled_from(["b", "a", "c"]), max_size=2, unique=True),
}
TYPES = {"text": pl.String, "number": pl.Float64, "whole": pl.Int64, "flag": pl.Boolean, "names": pl.List(pl.String)}


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_orders_are_those_of_plain_sorting(kind, data):
    values = data.draw(st.lists(st.none() | VALUES[kind], max_size=12))
    rows = pl.DataFrame({"value": pl.Series(values, dtype=TYPES[kind])}).with_row_index("place")
    column = RolloutColumn("value", "value", kind, "")
    for descending in (False, True):
        found = sort_rows(rows, column, descending)["place"].to_list()
        # `reverse=True` keeps equals in their order, as we do.
        assert found == slowly(rows.to_dicts(), "value", descending)


def test_equals_of_a_large_step_stay_as_they_came():
    values = [(n * 7919) % 3 or None for n in range(20_000)]  # few values: a sort that is not stable mixes thousands
    rows = pl.DataFrame({"value": values}).with_row_index("place")
    found = sort_rows(rows, RolloutColumn("value", "value", "whole", ""), True)["place"].to_list()
    assert found == slowly(rows.to_dicts(), "value", True)


@pytest.mark.parametrize("name", [column.name for column in COLUMNS])
def test_every_column_can_be_sorted_by(name):
    found = choose(frame(), TraceChoice(sort=name, order="desc")).rows
    assert found["place"].to_list() == slowly(frame().to_dicts(), name, True)


def test_a_column_is_named_by_its_heading_too():
    assert ids(choose(frame(), TraceChoice(sort="trace", order="desc")).rows)[0] == "t6"
    assert ids(choose(frame(), TraceChoice(order="desc")).rows) == [f"t{n}" for n in range(6, -1, -1)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, LARGEST_PAGE])
def test_the_pages_hold_every_row_once(size):
    choice = TraceChoice(sort="reward", order="desc", size=size)
    pages = choose(frame(), choice).num_pages
    assert pages == math.ceil(len(ROWS) / size)
    found = [ids(choose(frame(), replace(choice, page=page)).page) for page in range(1, pages + 1)]
    assert [each for page in found for each in page] == ids(choose(frame(), choice).rows)
    assert {len(each) for each in found[:-1]} <= {size}


def named() -> pl.DataFrame:
    """Traces with named rewards and metrics, and with texts that are no JSON of that kind."""
    rewards = ['{"style":{"score":0.5,"weight":1}}', '{"style":null}', "[1]", "{", None, '{"style":{"score":2}}', "{}"]
    metrics = ['{"a,b":1}', '{"a,b":NaN}', '{"flag":true}', "{}", "{}", '{"a,b":"text"}', "[" * 100_000]
    return frame().with_columns(rewards=pl.Series(rewards, dtype=pl.String), metrics=pl.Series(metrics))


def test_named_rewards_and_metrics_are_columns():
    chosen = choose(named(), TraceChoice(columns=("metric:a,b", "reward:style"), sort="reward:style", order="desc"))
    assert [each.name for each in chosen.columns] == ["trace_id", "metric:a,b", "reward:style"]
    assert chosen.rows["reward:style"].to_list() == [2.0, 0.5, None, None, None, None, None]
    assert ids(chosen.rows)[:3] == ["t5", "t0", "t1"]


def test_measures_of_any_name_and_size_can_be_listed():
    """An environment wrote them: a name that nothing can ask for, a number that no float holds."""
    odd = [f'{{"":1,"huge":{10**400},"long":{"1" * 5000}}}', f'{{"":1,"huge":{10**400}}}', *["{}"] * 5]
    measured = frame().with_columns(rewards=pl.lit("{}"), metrics=pl.Series(odd))
    chosen = choose(measured, TraceChoice(columns=("metric:huge",)))
    assert chosen.rows["metric:huge"].to_list() == [None] * 7


def test_an_address_says_a_choice():
    assert read_names(" reward , metric:a%2Cb ,") == ("reward", "metric:a,b")
    query = {"environment": "a", "page": "2"}
    found = choice_of(PageRequest("/runs/r/steps/0", {}, query))
    assert {name: value for name, value in found.filters.items() if value} == {"environment": "a"}
    assert (found.page, found.columns) == (2, ())
    for wrong in ({"page": "0"}, {"size": "501"}, {"page": "x"}, {"size": "-1"}):
        with pytest.raises(BadQuestion):
            choice_of(PageRequest("/", {}, wrong))
