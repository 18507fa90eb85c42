"""Seats: the judge and whoever does not learn are left out of every baseline, and out of evaluations."""

import json

import pytest

from configs.environments import EnvironmentConfig, SeatRule
from configs.run import RunConfig
from tasks.advantage.algorithms.credit import AdvantageBreach
from tasks.arrays.seats import LearnerSeatMissing, evaluated_seats, trained_seats
from tasks.filtering.stage import STAGE
from tests.fixtures.builders import environments, failed, table, trace, view
from tests.fixtures.stages import judged, tables_of, through_advantage

(ENVIRONMENT,) = environments(reverse={})
LEARNER = ENVIRONMENT | {"learner_seat": True}


def says(seat):
    return json.dumps({"learner_seat": seat})


def debate(number, rewards=(1.0, -1.0), learner=None, group="g0"):
    """The traces of one episode: two debaters and a judge that earns nothing; they say who learns, if anybody does."""
    seats = zip(("for", "against", "judge"), (*rewards, 0.0), strict=True)
    others = {"group_id": group, "episode_id": f"episode-{number}", "info": says(learner) if learner else "{}"}
    return [trace(f"{seat}-{number}", agent=seat, reward=reward, **others) for seat, reward in seats]


BOTH_FOR = [*debate(0, learner="for"), *debate(1, (0.0, 0.0), "for")]
"""Two episodes in which `for` learns."""


def lost_episode(number, *seats):
    return [failed(f"{seat}-{number}", agent=seat, episode_id=f"episode-{number}") for seat in seats]


def reasons(traces, environments=(), **others):
    found = judged(traces, environments=list(environments), **others)
    return {name: row["reason"] for name, row in found.items()}


def evidence(traces, name, **others):
    row = judged(traces, **others)[name]
    return row["reason"], row["evidence"]


def test_the_judge_is_left_out_by_default_and_kept_when_asked_for():
    rows = [*debate(0), *debate(1, (-1.0, 1.0))]
    assert {name for name, reason in reasons(rows).items() if reason} == {"judge-0", "judge-1"}
    assert evidence(rows, "judge-0") == ("judge", {"judge": {"agent": "judge"}})
    kept = [ENVIRONMENT | {"drop_judge": False}]
    assert evidence(rows, "judge-0", environments=kept, filters=[{"type": "errored"}]) == (None, {})


def test_only_the_learner_is_kept():
    assert reasons(BOTH_FOR, [LEARNER]) == {
        **{"for-0": None, "against-0": "other_seat", "judge-0": "judge"},
        **{"for-1": None, "against-1": "other_seat", "judge-1": "judge"},
    }
    told = evidence(BOTH_FOR, "against-0", environments=[LEARNER])
    assert told == ("other_seat", {"other_seat": {"learner_seat": "for"}})
    both = {name for name, reason in reasons(BOTH_FOR).items() if reason is None}
    assert both == {"for-0", "for-1", "against-0", "against-1"}


@pytest.mark.parametrize("info", ["{}", '{"learner_seat": null}', '{"learner_seat": 3}'])
def test_a_trace_that_does_not_say_who_learns_stops_the_stage(info):
    rows = [row | {"info": info} for row in debate(0)]
    with pytest.raises(LearnerSeatMissing, match="trace for-0 of environment 'reverse', agent 'for', has no 'learner_"):
        reasons(rows, [LEARNER])
    assert reasons(rows)["for-0"] != "other_seat"


def test_neither_the_judge_nor_an_errored_trace_which_is_a_failure_need_say_who_learns():
    lost = failed("lost", agent="for", num_turns=1)
    found = reasons([*BOTH_FOR, lost], [LEARNER])
    assert found["lost"] == "errored" and found["for-0"] is None
    silent = [*debate(0, learner="for")[:2], trace("judge-0", agent="judge")]
    assert reasons(silent, [LEARNER])["judge-0"] == "judge"


def test_dropped_seats_are_no_members_of_their_group():
    """Two debaters of equal rewards teach nothing, whatever the judge earned; its error leaves the group complete."""
    filters = [{"type": "errored"}, {"type": "incomplete_group"}, {"type": "zero_advantage"}]
    equal = [*debate(0, (1.0, 0.0)), *debate(1, (1.0, 0.0))]
    assert reasons(equal, filters=filters)["for-0"] == "zero_advantage"
    rows = [*debate(0, (1.0, 0.0))[:2], *debate(1, (0.0, 1.0))[:2]]
    for lost, expected in (
        (lost_episode(0, "judge"), {None, "judge"}),
        (lost_episode(2, "for"), {"incomplete_group", "errored"}),
    ):
        assert set(reasons(rows + lost, filters=filters).values()) == expected


def test_quarantine_goes_before_the_seat_and_the_seat_before_every_filter():
    judge = failed("judge-0", agent="judge")
    assert reasons([judge])["judge-0"] == "judge"
    assert reasons([judge], quarantined={"judge-0": "why"})["judge-0"] == "quarantined"


def test_keys_know_the_rules_only_where_they_are_not_the_default():
    assert RunConfig.model_validate({"environments": [LEARNER | {"learner_seat": False}]}).seat_rules == {}
    assert "seat_rules" not in view(STAGE).content()
    assert view(STAGE, environments=[LEARNER]).content()["seat_rules"] == {
        "reverse": {"drop_judge": True, "learner_seat": True}
    }


def credited(traces, environments=(), algorithm="grpo"):
    section = {"environments": list(environments), "algorithm": {"type": algorithm}}
    rows = through_advantage(tables_of(traces), **section)["samples"].to_pylist()
    return {row["trace_id"]: row["advantage"] for row in rows}


def test_one_learner_beside_a_judge_is_a_single_agent():
    """An algorithm without a baseline per agent takes it, where it refuses the two debaters."""
    assert credited(BOTH_FOR, [LEARNER]) == {"for-0": 0.5, "for-1": -0.5}
    with pytest.raises(AdvantageBreach, match="holds trainable agents 'for' and 'against'"):
        credited(BOTH_FOR)


def test_examples_of_one_learner_are_no_environment_of_one_agent():
    """Who learns may be drawn by example, and a step of few examples hold one seat alone: no reason to stop a run."""
    assert credited(BOTH_FOR, [LEARNER], "rae") == {"for-0": pytest.approx(0.9), "for-1": pytest.approx(-0.09)}
    single = [trace(f"s{n}", environment="sums", group_id="s", reward=float(n)) for n in range(2)]
    own = LEARNER | {"algorithm": {"type": "rae"}}
    turn = debate(2, (0.5, -0.5), "against", "g1")
    for others in (single, [*turn, *single]):
        assert {"s0", "s1"} < set(credited(BOTH_FOR + others, [own]))


def test_an_errored_trace_of_an_unknown_learner_is_no_second_agent():
    rows = [*BOTH_FOR, failed("against-2", agent="against", num_turns=3)]
    assert set(credited(rows, [LEARNER])) == {"for-0", "for-1"}
    trained = trained_seats(table("traces", rows), {"reverse": SeatRule(learner_seat=True)})
    assert trained["trace_id"].to_pylist() == ["for-0", "for-1"]


def counted(traces, **environment):
    own = EnvironmentConfig.model_validate(ENVIRONMENT | environment)
    return evaluated_seats(table("traces", traces), [own])["trace_id"].to_pylist()


def test_an_evaluation_counts_players_and_no_judge():
    frozen = trace("frozen", agent="against", trainable=False)
    assert counted([*debate(0), frozen]) == ["for-0", "against-0"]
    assert counted(debate(0), drop_judge=False) == ["for-0", "against-0", "judge-0"]
    assert evaluated_seats(table("traces", [trace("a", environment="elsewhere")]), [])["trace_id"].to_pylist() == ["a"]


def test_an_evaluation_counts_the_one_seat_that_it_is_told():
    rows = [*debate(0, learner="for"), *debate(1, learner="against")]
    assert counted(rows, evaluation_seat="against") == ["against-0", "against-1"]
    assert counted(rows, learner_seat=True) == ["for-0", "against-1"]
    both = counted(rows, evaluation_seat="against", learner_seat=True)
    assert both == ["against-0", "against-1"], "whoever would be trained: else half of the examples were never tried"


def test_an_episode_that_failed_before_the_seat_was_seen_counts_as_one_failed_attempt():
    """Left out, an errored policy would look better than it is; counted for every seat, worse."""
    early = failed("early", agent="agent", num_turns=0, episode_id="episode-1")
    rows = [*debate(0), early, *lost_episode(2, "for", "judge", "for again"), *lost_episode(3, "for", "against")]
    assert counted(rows, evaluation_seat="against") == ["against-0", "early", "for-2", "against-3"]


def test_an_episode_that_failed_before_it_named_its_learner_is_one_failed_attempt():
    half = [trace("for-3", agent="for", episode_id="episode-3", info=says("for")), failed("x", episode_id="episode-3")]
    rows = [*debate(0, learner="for"), *lost_episode(2, "for", "against"), *half]
    assert counted(rows, learner_seat=True) == ["for-0", "for-2", "for-3"]


def test_an_episode_in_which_the_seat_did_not_play_is_no_attempt_of_it():
    assert counted(debate(0)[:1], evaluation_seat="against") == []
