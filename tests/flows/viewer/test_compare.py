"""Two runs on pages: the values of the command, and the same step of both."""

import random
from itertools import cycle

import polars as pl
import pytest

from flows.queries.compare import ComparedStep, compare
from flows.queries.store_reader import StoreReader
from tests.fixtures import rehearsal
from tests.fixtures.builders import table
from tests.fixtures.rehearsal import play_stages, rehearse
from tests.fixtures.replays import RLOO, ask, walk
from tests.flows.viewer.looking import answer, pluck, values


def sampled(tables, config, *, step, policy):
    """Stand in for sampling: ids and rewards go by the sampling seed and the policy, as those of an engine do."""
    made = rehearsal.sampled(tables, config, step=step, policy=policy)
    seeds = {row["assignment_id"]: row["seed"] for row in tables["assignments"].to_pylist()}
    traces = made["traces"].to_pylist()
    names = {row["trace_id"]: f"{seeds[row['assignment_id']]:x}-{policy.key[:6]}" for row in traces}
    for row in (*traces, *(messages := made["messages"].to_pylist())):
        row["trace_id"] = names[row["trace_id"]]
    traces = [row | {"reward": random.Random(row["trace_id"]).random()} for row in traces]
    return {"traces": table("traces", traces), "messages": table("messages", messages)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of two steps, of three and of another seed, and a replay of the first."""
    root = tmp_path_factory.mktemp("compared") / "store"
    with play_stages(rollout=sampled):
        for name, changes in {"base": {}, "longer": {"steps": 3}, "seeded": {"seed": 8, "steps": 1}}.items():
            rehearse(root, name, **changes)
        walk(ask(root, name="credited", overrides=[RLOO]))
    return StoreReader.at(root)


def test_the_page_says_where_the_runs_part(runs):
    address = "/compare?a=base&b=credited"
    page, html = values(runs, address), answer(runs, address)[1]
    assert "They differ from step 0, stage advantage on: different key." in html
    ledger = page["ledger"]
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


def test_a_replay_from_the_advantage_has_the_same_rollouts_credited_otherwise(runs):
    step = ComparedStep(runs, "base", "credited", 0)
    traces, groups = step.traces, step.groups
    assert traces["side"].to_list() == ["both"] * 12 and traces["key_a"].equals(traces["key_b"].rename("key_a"))
    # RLOO leaves the rollout itself out of the mean: with four in a group that is 4/3 of the distance to the mean.
    assert traces["advantage_b"].to_list() == pytest.approx((traces["advantage_a"] * 4 / 3).to_list())
    moved = (pl.col("advantage_b") - pl.col("advantage_a")).abs().max()
    largest = traces.group_by("group_id_a", maintain_order=True).agg(moved)
    assert groups.select("group_a", "max_advantage_difference").rows() == largest.rows()
    assert groups["difference"].to_list() == [0.0] * 3 and groups["num_shared"].to_list() == [4] * 3
    address = "/compare?a=base&b=credited&step=0"
    samples, html = values(runs, address)["detail"]["samples"], answer(runs, address)[1]
    assert samples and all(f'href="/runs/base/traces/{row["sample_id"].rpartition("/")[0]}"' in html for row in samples)


def test_groups_of_another_seed_are_paired_by_their_example_alone(runs):
    step = ComparedStep(runs, "base", "seeded", 0)
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


def test_agents_of_an_episode_are_compared_each_with_its_like(tmp_path):
    """What one wins the other loses: over all agents every mean would be zero."""

    def opposed(tables, config, *, step, policy):
        made = sampled(tables, config, step=step, policy=policy)
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
