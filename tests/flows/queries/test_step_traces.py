"""The traces of a step: one row each, with outcomes as `why` and the derived table tell them, from that step's work."""

import json
import math

import polars as pl
import pytest

from flows.queries.metrics import numbers
from flows.queries.request import NotThere
from flows.queries.rollouts import lineages_of, rollout_columns
from flows.queries.step import figures, groups, updates
from flows.queries.store_reader import StoreReader
from flows.queries.trace import find_trace, trace_use
from flows.queries.views import select_from
from storage.read.frames import Frames
from storage.refs import Entry
from tests.fixtures.builders import message, table, trace
from tests.fixtures.step_traces import traces
from tests.flows.viewer.hand_made import NOW, PARTLY, RUN, HandMade
from tests.flows.viewer.looking import what_is_read


@pytest.fixture(scope="module")
def library(root):
    """The store with every outcome that a rollout can have, to look at."""
    return StoreReader.at(root)


def test_only_the_step_is_read_and_only_once(library, monkeypatch):
    fresh, read = StoreReader(library.store), what_is_read(monkeypatch)
    monkeypatch.setattr(Frames, "__getitem__", lambda *_: pytest.fail("a whole table was read"))
    one = traces(fresh, "base", 1)
    assert {step for _, step in read} == {1}
    assert {table for table, _ in read} == {"traces", "verdicts", "samples", "batches"}
    read.clear()
    other = StoreReader(library.store)
    assert rollout_columns(other, "base", lineages_of(other, "base", 1), ["policy_version"]).height == one.height
    assert read == [("traces", 1)]
    read.clear()
    assert traces(fresh, "base", 1).equals(one) and read == []
    assert not [name for name in one.columns if one.schema[name] == pl.List(pl.Float32)]


def test_the_figures_of_a_step(library):
    frame = traces(library, "base", 0)
    found = figures(frame)
    scored = frame.drop_nulls("reward")["reward"].to_list()
    assert (
        found["rollouts"].items()
        >= {
            **{"num_traces": 18, "num_groups": 3, "num_judged": 18},
            **{"num_kept": frame["keep"].sum(), "num_trained": frame["trained"].sum()},
        }.items()
    )
    reward, *_ = found["rewards"]
    assert (reward["environment"], reward["num_scored"]) == (None, len(scored)) and len(scored) == 14
    assert reward["mean"] == pytest.approx(sum(scored) / 14)
    assert sum(each["num_traces"] for each in found["outcomes"]) == 18
    by_filter = {each["filter"]: (each["num_found"], each["num_decided"]) for each in found["filters"]}
    assert by_filter["truncated"] == (3, 3) and by_filter["errored"] == (3, 3)
    json.dumps(found)


def test_stopped_rollouts_are_in_no_mean(library):
    frame = traces(library, "hurried", 0)
    given_up = pl.col("outcome").is_in(["stopped", "stale"])
    assert frame.filter(given_up).height == 5 and not frame.filter(outcome="stale").is_empty()
    loud = frame.with_columns(reward=pl.when(given_up).then(100.0).otherwise("reward"))
    assert figures(loud)["rewards"] == figures(frame)["rewards"]
    group = groups(loud).filter(pl.col("num_stopped") > 0).to_dicts()[0]
    assert group["num_stopped"] == 5 and group["reward_max"] < 100


@pytest.mark.parametrize(
    ("view", "name"), [("step_rewards", "max"), ("groups", "reward_max"), ("group_rewards", "highest")]
)
def test_a_reward_that_is_no_number_is_not_the_greatest(library, view, name):
    frame = traces(library, "base", 0)
    odd = pl.when(trace_id="trace-0-0-0").then(math.nan).otherwise("reward")
    found = select_from(frame.with_columns(reward=odd), f"select max({name}) as most from {view}")
    assert found["most"].item() == frame.filter(pl.col("trace_id") != "trace-0-0-0")["reward"].max()


@pytest.mark.parametrize("run", ["base", "hurried"])
def test_figures_of_a_finished_step_are_those_that_it_has_written(library, run):
    written, counted = numbers(library, run)[0], figures(traces(library, run, 0))
    for name, measure in {"mean": "reward/mean", "spread": "reward/std", "min": "reward/min"}.items():
        assert counted["rewards"][0][name] == pytest.approx(written.value(measure, "all"))
    for name, measure in {"num_turns": "num_turns", "truncated": "is_truncated", "staleness_mean": "staleness"}.items():
        assert counted["rollouts"][name] == pytest.approx(written.value(measure, "all"))


def test_the_updates_of_a_step(library):
    measured = updates(library, "base", [lineage.updates for lineage in lineages_of(library, "base", 1)])
    assert [each["update"] for each in measured] == [0, 1] and measured[0]["loss"] == 0.1
    assert updates(library, "begun", [None]) == []


def test_groups_by_hand(library):
    frame = traces(library, "base", 0)
    found = {row["group_id"]: row for row in groups(traces(library, "base", 0)).to_dicts()}
    assert list(found) == ["0-0", "0-1", "0-2"]
    for name, row in found.items():
        own = frame.filter(group_id=name)
        scored = own["reward"].drop_nulls()
        assert (row["num_traces"], row["num_scored"], row["num_errored"]) == (6, len(scored), 1)
        assert (row["reward_mean"], row["reward_spread"]) == pytest.approx((scored.mean(), scored.std(ddof=0)))
        assert (row["num_kept"], row["num_trained"]) == (own["keep"].sum(), own["trained"].sum())
    assert found["0-1"]["baseline"] is None and found["0-0"]["baseline"] is not None
    loo = groups(traces(library, "branch", 0))  # each has the mean of the others
    assert loo["baseline"].null_count() == loo.height
    assert groups(traces(library, "begun", 0))["num_kept"].null_count() == 3


def test_groups_are_in_the_order_that_people_count_in(library):
    ids = ["3-10", "3-2", "3.1-0", "3-0"]
    frame = traces(library, "base", 0).head(4).with_columns(group_id=pl.Series(ids))
    assert groups(frame)["group_id"].to_list() == ["3-0", "3-2", "3-10", "3.1-0"]


def test_a_trace_is_shown_as_the_first_run_has_it(root):
    reader = StoreReader.at(root)
    for name in ("trace-0-0-1", "trace-0-1-2"):  # run regraded scored it again
        assert trace_use(reader, name).run == "base" and trace_use(reader, name, "regraded").run == "regraded"
    with pytest.raises(NotThere, match=r"it is one of base"):
        find_trace(reader, "begun", "trace-1-0-1")


def test_while_rollouts_are_scored_again_the_others_are_there(tmp_path):
    made = HandMade(tmp_path)
    keys = made.step([trace("a"), trace("b")], [message("a", 0), message("b", 0)])
    piece = made.store.append("traces", table("traces", [trace("a")]), run=RUN, step=0, key=PARTLY, attempt="again")
    inputs = {"rollout": keys["rollout"]}
    made.store.ledger.commit(Entry(RUN, 0, "regrade", 1, PARTLY, "p0", "again", {}, inputs, (piece,), NOW, NOW))
    reader = StoreReader.at(tmp_path)
    assert [find_trace(reader, RUN, name).key for name in "ab"] == [PARTLY, keys["rollout"]]
    with pytest.raises(NotThere, match="names no trace"):
        find_trace(reader, RUN, "nowhere")
