"""Two runs on pages: the values of the command, and the same step of both."""

from itertools import cycle

import polars as pl
import pytest

from flows.queries.compare import ComparedStep, compare, compared_evaluations, compared_steps
from flows.queries.compare_summary import sentences
from flows.queries.store_reader import StoreReader
from tests.fixtures.builders import table
from tests.fixtures.evaluations import HELD_OUT, Sampler, train
from tests.fixtures.rehearsal import play_stages, rehearse
from tests.flows.viewer import compared_runs
from tests.flows.viewer.looking import answer, pluck, values

pytestmark = pytest.mark.engine  # ten runs are walked, a third of a second each
SUMMARIES = {
    ("base", "twin"): "The same work: all 14 results have the same keys, so their rows are equal.",
    ("base", "credited"): "They differ from step 0, stage advantage on: another key. Shared results: 7.",
    ("base", "longer"): "The same work as far as both go: 14 results have the same keys.",
    ("base", "broken"): "They differ from step 0, stage training on: another key. Shared results: 8.",
    ("first", "later"): "No step is in both. Results with the same keys: 1.",
    ("base", "base"): "The same work: all 14 results have the same keys, so their rows are equal.",
}


@pytest.mark.parametrize(("pair", "sentence"), SUMMARIES.items(), ids=str)
def test_the_page_says_where_the_runs_part(ten_runs, pair, sentence):
    address = "/compare?a={}&b={}".format(*pair)
    summary, html = values(ten_runs, address)["summary"], answer(ten_runs, address)[1]
    assert summary == sentences(compare(ten_runs, *pair)) and summary[0] == sentence
    assert all(line in html for line in summary)


def test_steps_of_runs_of_unlike_lengths_and_of_one_that_failed(ten_runs):
    assert sentences(compare(ten_runs, "base", "longer"))[1] == "Only in b: step 2."
    rows = compared_steps(ten_runs, "base", "longer").filter(figure="loss").select("only", "first_difference", "a", "b")
    assert rows.rows() == [(None, None, 0.0, 0.0), (None, None, 0.1, 0.1), ("only in b", "assignment", None, 0.2)]
    failed = compared_steps(ten_runs, "base", "broken").filter(figure="loss")
    assert failed["b"].to_list() == [0.0, None] and failed["weights_equal"].to_list() == [False, None]
    html = answer(ten_runs, "/compare?a=base&b=later")[1]
    assert 'b=later&amp;step=1">Look at step 1</a>' in html, "step 0 is there for its examples alone"


def test_the_ledger_of_both_is_one_picture_of_states(ten_runs):
    ledger = values(ten_runs, "/compare?a=base&b=credited")["ledger"]
    assert ledger["steps"] == [0, 1]
    states = {(ledger["stages"][cell["row"]], cell["column"]): cell["class"] for cell in ledger["cells"]}
    stages = {"assignment": "same", "rollout": "same", "filtering": "same", "advantage": "different"}
    stages |= {"packing": "different", "training": "lone_a"}
    expected = {(stage, column): state for stage, state in stages.items() for column in (0, 1)}
    assert states == expected | {("policy_import", 0): "lone_a", ("examples", 0): "same"}
    assert pluck(ledger["legend"], "count") == [7, 4, 3, 0]


def test_a_comparison_is_made_once_for_the_same_work_and_is_live_while_a_run_goes(tmp_path):
    store = rehearse(tmp_path / "store", "base", steps=1)
    reader = StoreReader.at(tmp_path / "store")
    first = compare(reader, "base", "base")
    rehearse(tmp_path / "store", "other", steps=1, seed=8)
    assert compare(reader, "base", "base") is first, "work of another run changes nothing"
    rehearse(tmp_path / "store", "base", steps=2)
    assert len(compare(reader, "base", "base")["steps"]) == 2 and len(first["steps"]) == 1
    store.runs.record(run="begun", event="started", kind="train", config=store.runs.config("base"))
    html = answer(reader, "/compare?a=base&b=begun")[1]
    assert "They have nothing in common" in html and "data-live-state" in html
    store.runs.record(run="begun", event="finished")
    neither = answer(reader, "/compare?a=begun&b=begun")[1]
    assert "Neither run has finished any work." in neither and "data-live-state" not in neither


# One step of both runs.
def test_a_replay_from_the_advantage_has_the_same_rollouts_credited_otherwise(ten_runs):
    step = ComparedStep(ten_runs, "base", "credited", 0)
    traces, groups = step.traces, step.groups
    assert traces["side"].to_list() == ["both"] * 12 and traces["key_a"].equals(traces["key_b"].rename("key_a"))
    # RLOO leaves the rollout itself out of the mean: with four in a group that is 4/3 of the distance to the mean.
    assert traces["advantage_b"].to_list() == pytest.approx((traces["advantage_a"] * 4 / 3).to_list())
    moved = (pl.col("advantage_b") - pl.col("advantage_a")).abs().max()
    largest = traces.group_by("group_id_a", maintain_order=True).agg(moved)
    assert groups.select("group_a", "max_advantage_difference").rows() == largest.rows()
    assert groups["difference"].to_list() == [0.0] * 3 and groups["num_shared"].to_list() == [4] * 3


def test_groups_of_another_seed_are_paired_by_their_example_alone(ten_runs):
    step = ComparedStep(ten_runs, "base", "seeded", 0)
    traces, groups = step.traces, step.groups
    assert set(traces["side"]) == {"a", "b"} and traces.height == 24
    means = {
        side: dict(traces.filter(side=side).group_by("example_id").agg(pl.col(f"reward_{side}").mean()).iter_rows())
        for side in "ab"
    }
    assert {*groups["example_id"]} == {*means["a"], *means["b"]} and groups["example_id"].n_unique() == groups.height
    for row in groups.iter_rows(named=True):
        for side in "ab":
            assert row[f"reward_{side}"] == pytest.approx(means[side].get(row["example_id"]))
    lone = groups.filter(num_b=0)
    assert set(lone["difference"]) <= {None} and set(lone["max_advantage_difference"]) <= {None}


def test_a_step_that_only_one_has_stands_alone(ten_runs):
    page = values(ten_runs, "/compare?a=base&b=longer&step=2")["detail"]
    assert page["only"] == "only in b" and page["num_rollouts"] == {"both": 0, "a": 0, "b": 12}
    assert pluck(page["groups"], "num_a", "reward_a", "num_b") == [(0, None, 4)] * 3


@pytest.mark.parametrize(("other", "num_differing"), [("credited", 10), ("seeded", 0), ("strict", 4)])
def test_a_step_leads_to_the_traces_that_differ(ten_runs, other, num_differing):
    address = f"/compare?a=base&b={other}&step=0"
    page, html = values(ten_runs, address)["detail"], answer(ten_runs, address)[1]
    differing = pluck(page["verdicts"], "trace_id")
    differing += [name.rpartition("/")[0] for name in pluck(page["samples"], "sample_id")]
    assert len(differing) == num_differing
    assert all(f'href="/runs/base/traces/{trace}"' in html for trace in differing)


def test_agents_of_an_episode_are_compared_each_with_its_like(tmp_path):
    """What one wins the other loses: over all agents every mean would be zero."""

    def opposed(tables, config, *, step, policy):
        made = compared_runs.sampled(tables, config, step=step, policy=policy)
        seats = cycle([{"agent": "second", "reward": -1.0}, {"agent": "first", "reward": 1.0}])
        rows = [row | seat for row, seat in zip(made["traces"].to_pylist(), seats, strict=False)]
        return made | {"traces": table("traces", rows)}

    with play_stages(rollout=opposed):
        for name, seed in (("one", 7), ("other", 8)):
            rehearse(tmp_path / "store", name, steps=1, seed=seed, algorithm={"type": "rae"})
    groups = ComparedStep(StoreReader.at(tmp_path / "store"), "one", "other", 0).groups
    rows = groups.filter(pl.col("num_a") > 0).sort("group_a", "agent")
    assert rows.select("agent", "num_a", "reward_a").rows() == [("first", 2, 1.0), ("second", 2, -1.0)] * 3
    assert set(groups.drop_nulls("difference")["difference"]) <= {0.0}


# Evaluations: whole runs, about a second each.
@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Two runs: the second has a step and a policy more, and one rollout of its evaluations failed."""
    root, settings = tmp_path_factory.mktemp("evaluated") / "store", {"attempts": 2, "every": 1}
    settings["num_examples"] = HELD_OUT
    train(root, "one", Sampler(), steps=1, evaluation=settings)
    train(root, "two", Sampler(frozenset({"eval-reverse_text-0/0"})), seed=8, evaluation=settings)
    return StoreReader.at(root)


def test_policies_of_a_version_are_paired_and_the_last_ones_too(evaluated):
    rows = compared_evaluations(evaluated, "one", "two").filter(figure="avg")
    assert pluck(rows.to_dicts(), "version_a", "version_b") == [(0, 0), (1, 1), (1, 2)]
    # Each later policy earns a tenth more on every example; where a rollout failed, the other one is left.
    assert rows["difference"].to_list() == pytest.approx([0.0, 0.0, 0.1], abs=0.005)
    last = rows.row(2, named=True)
    assert last["low"] < 0.1 < last["high"] and last["high"] - last["low"] < 0.02
    assert last["num_examples"] == HELD_OUT and last["a"] == pytest.approx(0.23, abs=0.005)
    itself = compared_evaluations(evaluated, "one", "one")
    assert itself["same_work"].all() and set(itself["difference"]) == {0.0} and not rows["same_work"].any()
