"""Incomplete group: one member that failed or was not scored, and the whole group goes."""

import json

from hypothesis import given
from hypothesis import strategies as st

from tasks.filtering.stage import STAGE, filtering
from tests.fixtures.builders import exchange, failed, table, trace, view

ALONE = [{"type": "errored"}, {"type": "incomplete_group"}]


def judged(traces, filters=ALONE, quarantined=()):
    messages = [row for one in traces for row in exchange(one["trace_id"])]
    tables = {"traces": table("traces", traces), "messages": table("messages", messages)}
    config = view(STAGE, filtering={"filters": filters})
    found = filtering(tables, config, quarantined=dict.fromkeys(quarantined, "why"))["verdicts"].to_pylist()
    return {row["trace_id"]: row for row in found}


def test_the_rest_of_a_group_that_lost_a_member_goes_too():
    rows = [trace("a"), trace("b", reward=0.0), failed("c"), trace("d", group_id="g1"), trace("e", group_id="g1")]
    verdicts = judged(rows)
    reasons = {name: verdict["reason"] for name, verdict in verdicts.items()}
    assert reasons == {"a": "incomplete_group", "b": "incomplete_group", "c": "errored", "d": None, "e": None}
    assert json.loads(verdicts["a"]["evidence"])["incomplete_group"] == {"members": 2, "size": 3}


def test_a_member_without_a_reward_is_lost_and_one_that_another_filter_found_is_not():
    assert judged([trace("a"), trace("b", reward=None)])["a"]["reason"] == "incomplete_group"
    filters = [*ALONE, {"type": "truncated", "enforce": True}]
    assert judged([trace("a"), trace("b", is_truncated=True)], filters)["a"]["keep"]
    assert judged([trace("a"), trace("b")], quarantined="b")["a"]["keep"], "it was scored, whatever was found since"


def test_a_reward_does_not_make_up_for_an_error():
    reasons = {name: row["reason"] for name, row in judged([trace("a"), failed("b", reward=1.0)]).items()}
    assert reasons == {"a": "incomplete_group", "b": "errored"}


def test_a_group_of_frozen_seats_alone_loses_nobody():
    rows = [trace("a"), trace("b", reward=0.0), trace("judge", group_id="g1", trainable=False, reward=None)]
    verdicts = judged(rows)
    assert [verdicts[name]["detected"] for name in ("a", "b", "judge")] == [[], [], []]


def test_seats_that_are_not_trained_may_have_no_reward():
    assert judged([trace("a"), trace("judge", trainable=False, reward=None)])["a"]["keep"]


def test_it_is_only_recorded_where_it_does_not_enforce():
    verdict = judged([trace("a"), failed("b")], [ALONE[0], ALONE[1] | {"enforce": False}])["a"]
    assert verdict["keep"] and verdict["detected"] == ["incomplete_group"]


@given(st.lists(st.tuples(st.sampled_from("gh"), st.sampled_from(["fine", "failed", "unscored"])), max_size=8))
def test_a_group_is_kept_as_a_whole_or_not_at_all(made):
    kinds = {"fine": trace, "failed": failed, "unscored": lambda name, **others: trace(name, reward=None, **others)}
    rows = [kinds[kind](f"t{n}", group_id=group) for n, (group, kind) in enumerate(made)]
    verdicts = judged(rows)
    for group in "gh":
        outcomes = [kind for of, kind in made if of == group]
        kept = [verdicts[f"t{n}"]["keep"] for n, (of, _) in enumerate(made) if of == group]
        assert kept == [set(outcomes) == {"fine"}] * len(kept)
