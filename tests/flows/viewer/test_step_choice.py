"""Choosing among traces: every filter alone and together, every order, pages; against the plainest Python there is."""

import math
from dataclasses import replace
from itertools import combinations

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.queries.request import BadQuestion, PageRequest
from flows.queries.rollout_list import (
    COLUMNS,
    LARGEST_PAGE,
    RolloutColumn,
    TraceChoice,
    choice_of,
    choose,
    known_values,
    sort_rows,
)

TYPES = {"text": pl.String, "number": pl.Float64, "whole": pl.Int64, "flag": pl.Boolean, "names": pl.List(pl.String)}
ROWS = pl.DataFrame(
    [
        ("a", "x", "trained", None, 0.5, [], "0", "one"),
        ("a", "y", "trained", None, 0.5, ["long"], "0", "one"),
        ("b", "x", "filtered", "long", 1.0, ["long"], "1", "one"),
        ("b", "x", "filtered", "loud", -2.0, ["loud", "long"], "1", "one"),
        ("b", "y", "errored", None, None, ["errored"], "1", "one"),
        ("b", "y", "quarantined", "quarantined", None, None, "1", "one"),
        ("a", "x", "pending", None, 0.0, None, "1", "two"),
    ],
    ["environment", "agent", "outcome", "reason", "reward", "detected", "group_id", "example_id"],
    orient="row",
).with_columns(
    place=pl.int_range(7),
    trace_id=pl.format("t{}", pl.int_range(7)),
    trained=pl.col("outcome") == "trained",
    error_class=pl.when(outcome="errored").then(pl.lit("timeout")),
    **{name: pl.lit("") for name in ("key", "detail")},
    **{name: pl.lit("{}") for name in ("metrics", "rewards")},
)
FRAME = ROWS.with_columns(
    pl.lit(None, pl.Int64).alias(column.name) for column in COLUMNS if column.name not in ROWS.columns
)
"""Rows as `step_traces.traces` has them, as far as they matter here."""
FILTERS = {
    "environment": ("environment", "b"),
    "agent": ("agent", "x"),
    "outcome": ("outcome", "filtered"),
    "filter": ("reason", "long"),
    "error": ("error_class", "timeout"),
    "group": ("group_id", "1"),
    "example": ("example_id", "two"),
}
"""For each filter a column and a value of it; `filter` looks for a value among those that detected, too."""


def passes(row, name):
    column, value = FILTERS[name]
    return row[column] == value or (name == "filter" and value in (row["detected"] or []))


def chosen(choice):
    return choose(FRAME, choice)[0]["trace_id"].to_list()


@pytest.mark.parametrize("names", [each for n in (1, 2) for each in combinations(FILTERS, n)], ids="+".join)
def test_filters_alone_and_together(names):
    found = chosen(TraceChoice({name: FILTERS[name][1] for name in names}))
    expected = [row["trace_id"] for row in FRAME.to_dicts() if all(passes(row, name) for name in names)]
    assert found == expected
    if len(names) == 1:
        assert 0 < len(expected) < len(ROWS)


def test_an_unknown_column_is_refused_with_those_that_there_are():
    for choice in (TraceChoice(sort="nothing"), TraceChoice(columns=("reward", "nothing"))):
        with pytest.raises(BadQuestion, match="there is no column 'nothing'; there are trace_id, reward"):
            choose(FRAME, choice)


def test_values_that_can_be_chosen():
    assert known_values(FRAME) == {
        **{"environment": ["a", "b"], "agent": ["x", "y"], "error": ["timeout"]},
        "outcome": ["errored", "filtered", "pending", "quarantined", "trained"],
        "filter": ["errored", "long", "loud", "quarantined"],
    }


def slowly(rows, name, descending):
    """The places of rows by a column: in either order what has no value comes last, and equals stay as they came."""

    def value(row):
        found = row[name]
        if isinstance(found, list):
            return ", ".join(found) or None
        return None if isinstance(found, float) and math.isnan(found) else found

    there = sorted((row for row in rows if value(row) is not None), key=value, reverse=descending)
    return [row["place"] for row in [*there, *(row for row in rows if value(row) is None)]]


VALUES = {
    "text": st.text(st.sampled_from("aB\u00e9\U0001f600 "), max_size=2),
    "number": st.sampled_from([0.0, 1.0, -1.5, math.nan, math.inf, 0.1]),
    "whole": st.integers(-2, 2),
    "flag": st.booleans(),
    "names": st.lists(st.sampled_from(["b", "a", "c"]), max_size=2, unique=True),
}


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_orders_are_those_of_plain_sorting(kind, data):
    check_order(kind, data.draw(st.lists(st.none() | VALUES[kind], max_size=12)))


def check_order(kind, values):
    rows = pl.DataFrame({"value": pl.Series(values, dtype=TYPES[kind])}).with_row_index("place")
    for descending in (False, True):
        found = sort_rows(rows, RolloutColumn("value", "value", kind, ""), descending)["place"].to_list()
        # `reverse=True` keeps equals in their order, as we do.
        assert found == slowly(rows.to_dicts(), "value", descending)


def test_equals_of_a_large_step_stay_as_they_came():
    # Few values: a sort that is not stable mixes thousands.
    check_order("whole", [(n * 7919) % 3 or None for n in range(20_000)])


@pytest.mark.parametrize("size", [1, 3, LARGEST_PAGE])
def test_the_pages_hold_every_row_once(size):
    choice = TraceChoice(sort="reward", order="desc", size=size)
    num_pages = choose(FRAME, choice)[1]["num_pages"]
    assert num_pages == math.ceil(len(ROWS) / size)
    pages = [choose(FRAME, replace(choice, page=page))[1]["rows"] for page in range(1, num_pages + 1)]
    assert [row["trace_id"] for page in pages for row in page] == chosen(choice)


def test_an_address_says_a_choice():
    found = choice_of(PageRequest("/runs/r/steps/0", {}, {"environment": "a", "page": "2"}))
    assert [*filter(all, found.filters.items())] == [("environment", "a")]
    assert (found.page, found.columns) == (2, ())
    for wrong in ({"page": "0"}, {"size": "501"}, {"page": "x"}, {"size": "-1"}):
        with pytest.raises(BadQuestion):
            choice_of(PageRequest("/", {}, wrong))
