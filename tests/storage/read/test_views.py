"""The views: each says what a row and a column is, has these columns, and sums floats in one order."""

import re

import polars as pl
import pytest

from storage.read.views import all_views, needed_views, select
from tests.fixtures.view_schemas import schema

VIEWS = all_views()
SUMMED = re.compile(
    r"^ +(?:sum|avg|stddev_pop)\((\w+)(::\w+)?(?P<order> order by [^)]+)?\).*?(\w+),?  --", re.MULTILINE
)
WHOLE = ("rows", "num_tokens", "num_sampled_tokens", "num_input_tokens", "num_output_tokens", "num_turns", "staleness")
"""Columns of whole numbers: their sums are exact in any order."""


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_describes_its_rows_and_has_the_columns_that_it_describes(view):
    assert view.row and all(view.columns.values())
    assert schema(view.name).names() == list(view.columns)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_sums_of_floats_have_one_order(view):
    for match in SUMMED.finditer(view.sql):
        assert match["order"] or match[1] in WHOLE or match[2] == "::int", f"{view.name}: {match[0].strip()}"


def test_floats_are_summed_by_these_columns_alone():
    ordered = {
        f"{view.name}.{match[4]}" for view in VIEWS.values() for match in SUMMED.finditer(view.sql) if match["order"]
    }
    assert ordered == {
        *(
            "accounting.seconds",
            "group_rewards.mean",
            "groups.reward_mean",
            "groups.reward_spread",
            "step_rewards.mean",
        ),
        *("step_rewards.spread", "step_rollouts.seconds", "rollout_mismatch.mismatch_kl"),
        *("mismatch_splits.mismatch_kl", "mismatch_splits.log_ratio"),
        *(f"sample_weights.{component}_weights" for component in ("rl", "ce", "ref_kl")),
    }


def test_what_a_join_takes_is_read_where_a_query_names_its_columns():
    for query, read in (("select reward", False), ("select reply", True), ("select *", False)):
        assert ("rollout_texts" in needed_views(f"{query} from rollouts", VIEWS)) == read, query
    assert "traces.record" not in needed_views("select * from rollouts", VIEWS)["rollouts"]


@pytest.mark.parametrize(
    "query",
    [
        *("select * from rollouts", "from rollouts", "select columns(*) from rollouts", "FROM rollouts limit 1"),
        *("summarize rollouts", "describe rollouts", "desc rollouts", "table rollouts"),
        "select columns('o.*') from rollouts",
        *("select count(*) from (from rollouts)", "select '--', outcome, advantage from rollouts"),
    ],
)
def test_a_query_asks_for_columns_by_name_or_for_all(query):
    assert {"rollout_outcomes", "rollout_samples"} <= needed_views(query, VIEWS).keys()


@pytest.mark.parametrize(
    "query",
    ["select count(*) from rollouts", "select reward from rollouts -- outcome *", "select 'it''s' from rollouts"],
)
def test_what_counts_is_no_column(query):
    assert needed_views(query, VIEWS).keys() == {"rollouts"}


def test_a_relation_takes_the_place_of_a_view():
    rows = pl.DataFrame({"run": ["a", "a"], "step": [0, 0], "outcome": ["errored", "trained"]})
    columns = "environment, example_id, group_id, agent, trace_id, reward, baseline, keep, trained"
    rows = rows.with_columns(pl.lit(None).alias(name) for name in columns.split(", "))
    found = select({"rollouts": lambda: rows}, "select num_traces, num_errored from groups where step = $step", step=0)
    assert found.rows() == [(2, 1)]
