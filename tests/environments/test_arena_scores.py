"""Scores of several members: whole or not at all, whatever form they come in, and what of them is written."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_arena.errors import ScoreError
from sample_arena.scores import EpisodeScore, MemberScore, complete, errored, of_rewards, record, zero_sum_reward

from tests.fixtures.commands import cases

PAIR = ("a", "b")
MEMBERS = ("affirmative", "negative", "judge")


@dataclass
class Trace:
    """As much of a trace as a score is written on."""

    name: str
    rewards: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def agent(self):
        return SimpleNamespace(name=self.name)

    def record_reward(self, name, value):
        self.rewards[name] = value

    def record_metrics(self, values):
        self.metrics.update(values)


def score_of(**rewards):
    return {"members": [{"member": member, "reward": reward} for member, reward in rewards.items()]}


@dataclass
class Foreign:
    """A score of someone's own making, with the attributes that count."""

    members: list[MemberScore]
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@pytest.mark.parametrize(
    "value",
    [
        score_of(b=1, a=-0.5),
        EpisodeScore.model_validate(score_of(b=1, a=-0.5)),
        of_rewards({"b": 1, "a": -0.5}),
        Foreign([MemberScore(member="b", reward=1), MemberScore(member="a", reward=-0.5)]),
    ],
)
def test_a_score_is_a_mapping_or_an_object_and_takes_the_order_of_the_members(value):
    assert list(complete(value, PAIR).rewards.items()) == [("a", -0.5), ("b", 1.0)]


@cases(__file__, "wrong_scores")
def test_a_score_that_leaves_out_adds_or_mixes_is_refused(value, told):
    with pytest.raises(ScoreError, match=told):
        complete(value, PAIR)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from("abcd"), unique=True), st.lists(st.sampled_from("abcd"), unique=True, min_size=1))
def test_a_score_fits_exactly_where_it_rewards_the_same_members(rewarded, members):
    value = score_of(**{member: float(ord(member)) for member in rewarded})
    if sorted(rewarded) == sorted(members):
        assert complete(value, members).rewards == {member: float(ord(member)) for member in members}
    else:
        with pytest.raises(ScoreError):
            complete(value, members)


def test_a_failed_episode_scores_nobody_and_overwrites_nothing():
    assert errored("gone", PAIR).rewards == {"a": None, "b": None}
    partial = {"members": [{"member": "b", "reward": 0.5, "metrics": {"n": 2}}], "metrics": {"m": 1}}
    score = errored("gone", PAIR, partial)
    assert score.rewards == {"a": None, "b": 0.5} and score.error == "gone"
    assert score.members[1].metrics == {"n": 2} and score.metrics == {"m": 1}
    assert errored("gone", PAIR, {**partial, "error": "first"}).error == "first"
    with pytest.raises(ScoreError, match="'c'"):
        errored("gone", PAIR, score_of(c=1))


@pytest.mark.parametrize(
    ("winner", "rewards"), [("affirmative", (1, -1, 0)), ("negative", (-1, 1, 0)), (None, (0, 0, 0))]
)
def test_the_winner_takes_what_the_loser_gives_and_the_judge_gets_nothing(winner, rewards):
    assert tuple(zero_sum_reward(MEMBERS, winner).values()) == rewards
    assert list(zero_sum_reward(MEMBERS, winner)) == list(MEMBERS)


def test_a_score_is_written_onto_the_traces_of_its_members():
    traces = [Trace("b"), Trace("a")]
    value = {**score_of(a=1, b=0), "metrics": {"total_turns": 4}}
    value["members"][0]["metrics"] = {"won": 1}
    record(complete(value, PAIR), traces)
    assert [trace.rewards for trace in traces] == [{"outcome": 0.0}, {"outcome": 1.0}]
    assert [trace.metrics for trace in traces] == [{"total_turns": 4}, {"total_turns": 4, "won": 1}]
    assert not any(trace.info for trace in traces)


def test_who_is_not_scored_has_a_reward_that_was_not_computed_and_no_zero():
    traces = [Trace("a"), Trace("b")]
    record(errored("gone", PAIR, score_of(a=0.0)), traces)
    assert [trace.rewards for trace in traces] == [{"outcome": 0.0}, {"outcome": None}]
    assert [trace.info for trace in traces] == [{"episode_error": "gone"}] * 2


@pytest.mark.parametrize(
    ("traces", "told"),
    [
        ([Trace("a"), Trace("b"), Trace("c")], r"traces of \['c'\]"),
        ([Trace("a")], r"members \['b'\] are rewarded"),
        ([Trace("a"), Trace("b", {"similarity": 0.5})], "its task rewarded it already"),
    ],
)
def test_a_score_that_does_not_fit_the_traces_writes_nothing(traces, told):
    before = [(dict(trace.rewards), dict(trace.metrics)) for trace in traces]
    with pytest.raises(ScoreError, match=told):
        record(of_rewards({"a": 1, "b": 0}), traces)
    assert [(trace.rewards, trace.metrics) for trace in traces] == before
