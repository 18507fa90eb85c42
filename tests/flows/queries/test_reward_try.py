"""What another reward says of stored rollouts: scores, figures worked by hand, and functions that fail."""

import json
import math
import os

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from configs.errors import ConfigError
from configs.load import load
from flows.cli.reward import settings_of, tried_reward
from flows.queries.reward_figures import try_figures
from flows.queries.reward_try import SCHEMA, TriedReward, TriedStep, score_step, try_reward
from flows.queries.store_reader import StoreReader
from tasks.arrays.columns import with_column
from tests.fixtures import rehearsal
from tests.fixtures.judging import judge_at, stand_in

HERE = "tests.flows.queries.test_reward_try"


def longest(group):
    """Score each rollout by the length of its reply."""
    return [float(len(one.reply)) for one in group]


def recorded(group):
    """Score each rollout by its recorded reward."""
    return [one.reward for one in group]


def fails_for_some(group):
    """Fail for the groups that have no right rollout."""
    if not max(one.reward for one in group):
        raise ValueError("nothing is right here")
    return recorded(group)


def ends_its_process(group):
    """End the process, as a crash in C does."""
    os._exit(7)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with the run `base` of two steps."""
    root = tmp_path_factory.mktemp("tried")
    rehearsal.rehearse(root, "base")
    return StoreReader.at(root)


def tried(store, function, **settings):
    """Return the rows of a try of a function of this file."""
    config, what = store.config("base"), TriedReward(function, f"{HERE}:{function}", **settings)
    steps = [TriedStep.of(store, lineage, config) for lineage in store.history("base").lineages]
    return pl.concat(score_step(store.store.root.address, step, what) for step in steps)


def test_the_recorded_reward_tried_again_gives_the_recorded_advantages(store):
    rows = tried(store, "recorded")
    assert rows.height == 24 and rows["score"].equals(rows["recorded"].rename("score"))
    # Added to itself it doubles the reward, and with it the advantage of GRPO.
    assert rows["reward"].to_list() == [2 * value for value in rows["recorded"]]
    both = rows.drop_nulls(["advantage_before", "advantage"])
    assert both.height and np.allclose(2 * both["advantage_before"], both["advantage"])


def test_a_function_that_fails_costs_its_own_group(store):
    rows = tried(store, "fails_for_some")
    whole = tried(store, "recorded").group_by("group_id").agg(pl.col("recorded").max())
    failed = set(whole.filter(recorded=0)["group_id"])
    assert set(rows.filter(pl.col("score").is_null())["group_id"]) == failed
    assert all("nothing is right here" in text for text in rows["error"].drop_nulls())


def test_a_function_that_ends_its_process_is_an_error_of_its_rows(store):
    what = TriedReward("gone", f"{HERE}:ends_its_process")
    rows = pl.concat(try_reward(store, ["base"], what))
    assert rows.height == 24 and set(rows["error"]) == {"the function ended its process"}
    assert try_figures(rows, 1.0)["num_unscored"] == 24


def test_a_run_named_twice_is_scored_once(store):
    with stand_in() as server:
        what = TriedReward("kind", judge=judge_at(server.url, prompt="Twice: {response}"))
        assert pl.concat(try_reward(store, ["base", "base"], what)).height == 24


def test_a_recorded_reward_of_the_same_name_gives_its_place(tmp_path, monkeypatch):
    def named(tables, config, *, step, policy):
        made = rehearsal.sampled(tables, config, step=step, policy=policy)
        traces = made["traces"]
        parts = [json.dumps({"kind": {"score": value, "weight": 1.0}}) for value in traces["reward"].to_pylist()]
        return made | {"traces": with_column(traces, "rewards", pa.array(parts))}

    rehearsal.play(monkeypatch, rollout=named)
    rehearsal.rehearse(tmp_path, "base")
    store = StoreReader.at(tmp_path)
    with stand_in() as server:
        judged = pl.concat(try_reward(store, ["base"], TriedReward("kind", judge=judge_at(server.url))))
    config, what = store.config("base"), TriedReward("kind", f"{HERE}:longest")
    steps = [TriedStep.of(store, lineage, config) for lineage in store.history("base").lineages]
    called = pl.concat(score_step(store.store.root.address, step, what) for step in steps)
    for rows in (judged, called):
        assert rows["recorded"].sum() > 0 and rows["score"].null_count() == 0
        assert rows["reward"].equals(rows["score"].rename("reward"))


def test_what_can_not_be_tried_is_refused(store):
    config = store.config("base")
    for text in ("no_module:score", f"{HERE}:absent", "no_judge"):
        with pytest.raises(ConfigError):
            tried_reward(text, config, 1.0)
    assert not tried_reward("builtins:max", config, 1.0).replaces  # it has no signature
    what = tried_reward(f"{HERE}:longest", config, 0.5)
    assert settings_of(what, config) == [
        f'environments.0.group_rewards.longest={{function="{HERE}:longest", weight=0.5}}'
    ]


def frame(recorded, score, group=None, reward=None):
    """Return rows of one step with these rewards."""
    count = len(score)
    columns = {"run": ["r"] * count, "step": [0] * count, "agent": [""] * count}
    columns |= {"trace_id": [f"t{place}" for place in range(count)], "group_id": group or ["g"] * count}
    columns |= {"recorded": recorded, "score": score, "reward": reward or score}
    return pl.DataFrame({name: columns.get(name, [None] * count) for name in SCHEMA}, schema=SCHEMA)


def test_agreement_is_that_of_the_formulas():
    # 20 right in both, 15 wrong in both, 5 and 10 apart: the table of many textbooks; kappa 0.4.
    cases = [(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15
    figures = try_figures(frame(*map(list, zip(*cases, strict=True))), 1.0)
    rank, kappa = figures["agreement"]
    assert kappa["value"] == pytest.approx(0.4)
    assert kappa["low"] == pytest.approx(0.4 - 1.959964 * math.sqrt(0.7 * 0.3 / 50) / 0.5)
    assert rank["value"] == pytest.approx(np.corrcoef(*zip(*cases, strict=True))[0, 1])  # two values: ranks are linear
    assert figures["flips"]["num_flips"] == 15 and figures["num_scored"] == 50


def test_pairs_and_groups_are_counted():
    rows = frame([0.0, 1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.5, 0.2, 0.9], ["a", "a", "b", "b", "c"])
    figures = try_figures(rows, 1.0)
    assert figures["pairs"] == {"same_order": 0, "turned": 1, "newly_told_apart": 1, "no_longer_told_apart": 0}
    assert (figures["groups"]["gain_a_signal"], figures["groups"]["lose_their_signal"]) == (1, 0)
    equal = try_figures(frame([0.0, 1.0], [0.3, 0.3]), 1.0)
    assert equal["groups"]["lose_their_signal"] == 1 and equal["pairs"]["no_longer_told_apart"] == 1


def test_a_judge_is_tried_and_asked_once(store):
    with stand_in() as server:
        what = TriedReward("kind", judge=judge_at(server.url, weight=2.0), weight=2.0)
        first, again = (pl.concat(try_reward(store, ["base"], what)) for _ in range(2))
        assert first.height == 24 and set(first["score"]) == {0.5}
        assert first["reward"].to_list() == [value + 1 for value in first["recorded"]]
        assert set(server.requests.values()) == {1} and again.equals(first)
    config = store.config("base")
    other = judge_at("http://a/v1", name="other")
    (setting,) = settings_of(what, config.model_copy(update={"judges": (other, judge_at("http://b/v1"))}))
    judges = load((), (setting, "packing.tokens_per_row=512"), base=config.model_dump(mode="json")).judges
    assert [(judge.name, judge.url, judge.weight) for judge in judges] == [
        ("other", "http://a/v1", 1.0),
        ("kind", server.url, 2.0),
    ]
