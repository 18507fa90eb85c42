"""The same step of two runs: which rollouts are the same, and what of them changed, as `stagecoach diff` has it."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from configs.run import View
from flows.queries.compare import compare, step_pair
from flows.queries.compare_rows import changed_advantages, changed_verdicts
from flows.queries.compare_traces import compared_groups, compared_samples, compared_traces
from flows.queries.request import NotThere
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from tasks.runtime.stage import Policy, Tables
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer import compared_runs, looking
from tests.flows.viewer.compared_runs import with_column

pytestmark = pytest.mark.engine  # see test_compare


def answer(library: StoreReader, a: str, b: str, step: int, **query: str) -> tuple[int, str]:
    return looking.answer(library, addresses.compare_step(a, b, step), **query)


def values(library: StoreReader, a: str, b: str, step: int, **query: str) -> dict[str, Any]:
    return looking.values(library, addresses.compare_step(a, b, step), **query)


@pytest.mark.parametrize(("a", "b"), [("base", "credited"), ("base", "strict"), ("base", "twin"), ("strict", "seeded")])
def test_groups_samples_and_verdicts_are_those_of_the_command(ten_runs: StoreReader, a: str, b: str) -> None:
    found = compare(ten_runs, a, b, step=0)
    groups = {row["group_a"]: row for row in compared_groups(ten_runs, a, b, 0).to_dicts() if row["num_shared"]}
    for row in found["detail"]["groups"]:
        own = groups.get(row["group_id"])
        if own is None:
            assert (a, b) == ("strict", "seeded"), "the same number of a group, at another example"
            continue
        assert (own["reward_a"], own["reward_b"]) == (row["reward_mean_a"], row["reward_mean_b"])
        assert (own["kept_a"], own["kept_b"]) == (row["num_kept_a"], row["num_kept_b"])
        assert own["max_advantage_difference"] == row["max_advantage_difference"]
    pair = step_pair(ten_runs, a, b, 0)
    moved = compared_samples(ten_runs, a, b, 0).filter(pl.col("difference") != 0)
    expected = changed_advantages(*pair).sort("sample_id")
    columns = ("sample_id", "a", "b", "difference")
    assert moved.select(columns).equals(expected.select(columns))
    traces = compared_traces(ten_runs, a, b, 0)
    judged = traces.filter(pl.col("outcome_a") != pl.col("outcome_b")).sort("trace_id")
    assert judged.select("trace_id", "outcome_a", "outcome_b").rows() == changed_verdicts(*pair).rows()
    assert (traces["side"] == "both").sum() == found["steps"][0]["between"]["num_shared_traces"]


def test_a_replay_from_the_advantage_has_the_same_rollouts_credited_otherwise(ten_runs: StoreReader) -> None:
    traces = compared_traces(ten_runs, "base", "credited", 0)
    assert traces["side"].to_list() == ["both"] * 12 and traces["key_a"].equals(traces["key_b"].rename("key_a"))
    # RLOO leaves the rollout itself out of the mean: with four in a group that is 4/3 of the distance to the mean.
    for row in traces.iter_rows(named=True):
        assert row["advantage_b"] == pytest.approx(4 / 3 * row["advantage_a"])
    groups = compared_groups(ten_runs, "base", "credited", 0)
    largest = traces.group_by("group").agg(((pl.col("advantage_b") - pl.col("advantage_a")).abs()).max()).sort("group")
    assert groups["max_advantage_difference"].to_list() == largest["advantage_b"].to_list()
    assert groups["difference"].to_list() == [0.0] * 3 and groups["num_shared"].to_list() == [4] * 3


def test_groups_of_another_seed_are_paired_by_their_example_alone(ten_runs: StoreReader) -> None:
    traces = compared_traces(ten_runs, "base", "seeded", 0)
    assert set(traces["side"]) == {"a", "b"} and traces.height == 24
    groups = compared_groups(ten_runs, "base", "seeded", 0)
    for row in groups.iter_rows(named=True):
        own = traces.filter(pl.col("group") == row["group"])
        assert set(own["example_id"]) == {row["example_id"]}
        for side in "ab":
            rewards = own.filter(pl.col("side") == side)[f"reward_{side}"]
            assert row[f"num_{side}"] == len(rewards)
            mean = rewards.mean()
            assert row[f"reward_{side}"] == (None if mean is None else pytest.approx(mean))
    one, other = (set(traces.filter(pl.col("side") == side)["example_id"]) for side in "ab")
    assert groups.height == len(one | other) and groups.filter(pl.col("group_a").is_null()).height == len(other - one)
    lone = groups.filter(pl.col("num_b") == 0)
    assert set(lone["difference"]) <= {None} and set(lone["max_advantage_difference"]) <= {None}


def test_a_step_that_only_one_has_stands_alone(ten_runs: StoreReader) -> None:
    said = values(ten_runs, "base", "longer", 2)
    assert said["work"]["only"] == "only in b" and said["in_run"] == {"a": False, "b": True}
    assert said["rollouts"] == {"both": 0, "a": 0, "b": 12}
    assert [(row["num_a"], row["reward_a"], row["num_b"]) for row in said["rows"]] == [(0, None, 4)] * 3
    assert (said["previous"], said["next"]) == (1, None)
    with pytest.raises(NotThere, match="neither 'base' nor 'longer' has step 7; the nearest are 2, 1, 0"):
        step_pair(ten_runs, "base", "longer", 7)
    assert answer(ten_runs, "base", "longer", 7)[0] == 404


def test_what_was_sampled_anew_is_in_one_only(ten_runs: StoreReader) -> None:
    said = values(ten_runs, "base", "faster", 1, view="lone", sort="reward", down="1")
    assert said["rollouts"] == {"both": 0, "a": 12, "b": 12} and said["num_rows"] == 24
    rewards = [row["reward"] for row in said["rows"]]
    assert rewards == sorted(rewards, reverse=True) and {row["side"] for row in said["rows"]} == {"a", "b"}
    assert said["work"]["first_difference"] == "rollout"


def test_verdicts_that_differ_are_told_with_their_reasons(ten_runs: StoreReader) -> None:
    said = values(ten_runs, "base", "strict", 0, view="verdicts")
    assert said["rows"] and {(row["outcome_a"], row["outcome_b"]) for row in said["rows"]} == {
        ("kept", "zero_advantage")
    }


@pytest.mark.parametrize("view", ["groups", "verdicts", "samples", "lone"])
@pytest.mark.parametrize("pair", [("base", "credited"), ("base", "seeded"), ("base", "broken"), ("twin", "base")])
def test_every_table_is_a_page_and_leads_to_the_traces_in_both_runs(
    ten_runs: StoreReader, view: str, pair: tuple[str, str]
) -> None:
    said = values(ten_runs, *pair, 0, view=view)
    status, html = answer(ten_runs, *pair, 0, view=view)
    assert status == 200 and len(said["rows"]) == said["num_rows"]
    assert {each["name"]: each["num"] for each in said["views"]}[view] == said["num_rows"]
    for row in said["rows"]:
        if view == "groups":
            assert len(row["rewards_a"]) == row["num_a"] and len(row["rewards_b"]) == row["num_b"]
        elif view == "samples":
            for run, key in zip(pair, (row["key_a"], row["key_b"]), strict=True):
                assert f'href="/runs/{run}/traces/{row["trace_id"]}?key={key}"' in html


def test_samples_come_the_farthest_first_and_sort_by_any_column(ten_runs: StoreReader) -> None:
    sizes = [row["size"] for row in values(ten_runs, "base", "credited", 0, view="samples")["rows"]]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 12
    ids = [
        row["sample_id"] for row in values(ten_runs, "base", "credited", 0, view="samples", sort="sample_id")["rows"]
    ]
    assert ids == sorted(ids)
    assert answer(ten_runs, "base", "credited", 0, view="samples", sort="luck")[0] == 400
    assert answer(ten_runs, "base", "credited", 0, view="luck")[0] == 400
    assert values(ten_runs, "base", "credited", 0, page="9")["rows"] == []


def test_agents_of_an_episode_are_compared_each_with_its_like(tmp_path: Path) -> None:
    """What one wins the other loses: over all agents every mean would be zero."""

    def opposed(tables: Tables, config: View, *, step: int, policy: Policy) -> Tables:
        made = compared_runs.sampled(tables, config, step=step, policy=policy)
        traces = made["traces"]
        won = [float(number % 2) * 2 - 1 for number in range(traces.num_rows)]
        agents = ["first" if reward > 0 else "second" for reward in won]
        return made | {"traces": with_column(with_column(traces, "reward", won), "agent", agents)}

    with compared_runs.played(rollout=opposed):
        for name, seed in (("one", 7), ("other", 8)):
            rehearse(tmp_path / "store", name, steps=1, seed=seed, algorithm={"type": "rae"})
    library = StoreReader.at(tmp_path / "store")
    groups = compared_groups(library, "one", "other", 0)
    own = groups.filter(pl.col("num_a") > 0)
    assert own.select("agent", "num_a", "reward_a").rows() == [("first", 2, 1.0), ("second", 2, -1.0)] * 3
    assert set(groups.drop_nulls("difference")["difference"]) <= {0.0}
    said = values(library, "one", "other", 0)
    assert said["agents"] == 2
    assert [row["group_a"] for row in said["rows"][:6]] == ["0-0"] * 2 + ["0-1"] * 2 + ["0-2"] * 2
