"""Filtering: what each filter finds, what it says about it, and what is kept."""

import json
from math import exp, log
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.filters import FilterConfig
from storage.schemas.stage_tables import TABLES
from tasks.advantage.stage import STAGE as ADVANTAGE
from tasks.arrays.message_graph import BrokenGraph
from tasks.filtering.filters import FILTERS
from tasks.filtering.filters.gibberish import UnknownVocabulary
from tasks.filtering.filters.repetition import runs
from tasks.filtering.stage import STAGE
from tests.fixtures.builders import exchange, failed, message, table, trace, view
from tests.fixtures.stages import VOCABULARY, advantage, filtering, judged


def test_every_filter_of_the_config_has_a_detector():
    kinds = get_args(get_args(FilterConfig)[0])
    assert {get_args(kind.model_fields["type"].annotation)[0] for kind in kinds} == set(FILTERS)


def test_a_clean_trace_is_kept():
    verdict = judged([trace("a", reward=1.0), trace("b", reward=0.0)])["a"]
    assert verdict["keep"] and verdict["reason"] is None and verdict["detected"] == [] and verdict["evidence"] == {}
    assert judged([], []) == {}


def test_errored_traces_go_even_if_no_filter_asks_for_it():
    rows = [failed("a", error_class="infrastructure"), trace("b"), trace("c", reward=0.0)]
    for filters in (None, [], [{"type": "truncated"}]):
        verdicts = judged(rows, filters=filters)
        assert verdicts["a"]["reason"] == "errored" and verdicts["b"]["keep"]
        assert verdicts["a"]["evidence"]["errored"] == {"error_class": "infrastructure", "error_type": "TimeoutError"}


def test_truncated_is_recorded_and_excludes_only_when_it_enforces():
    rows = [trace("a", is_truncated=True, stop_condition="length"), trace("b", reward=0.0)]
    noted = judged(rows)["a"]
    assert noted["keep"] and noted["detected"] == ["truncated"]
    assert noted["evidence"]["truncated"] == {"stop_condition": "length", "num_output_tokens": 2}
    enforced = judged([*rows, trace("c")], filters=[{"type": "truncated", "enforce": True}])
    assert enforced["a"]["reason"] == "truncated" and enforced["b"]["keep"]


def test_a_group_of_equal_rewards_teaches_nothing():
    rows = [trace("a"), trace("b"), trace("c", group_id="g1"), trace("d", group_id="g1", reward=0.5)]
    verdicts = judged(rows)
    assert verdicts["a"]["reason"] == verdicts["b"]["reason"] == "zero_advantage"
    assert verdicts["a"]["evidence"]["zero_advantage"] == {"spread": 0.0, "reward": 1.0, "members": 2}
    assert verdicts["c"]["keep"] and verdicts["d"]["keep"]


def test_the_spread_may_be_up_to_the_tolerance():
    rows = [trace("a", reward=0.5), trace("b", reward=0.75)]
    kept = [judged(rows, filters=[{"type": "zero_advantage", "tolerance": t}])["a"]["keep"] for t in (0.24, 0.25)]
    assert kept == [True, False]


def test_an_errored_member_does_not_make_a_group_worth_comparing():
    verdicts = judged([trace("a"), trace("b"), failed("c", reward=0.0)])
    assert verdicts["a"]["reason"] == "zero_advantage"
    assert verdicts["c"]["reason"] == "errored" and verdicts["c"]["detected"] == ["errored"]


@pytest.mark.parametrize("first", ["zero_advantage", "truncated"])
def test_groups_are_judged_on_what_the_other_filters_leave(first):
    filters = [{"type": "zero_advantage"}, {"type": "truncated", "enforce": True}]
    rows = [trace("a"), trace("b"), trace("c", reward=0.0, is_truncated=True)]
    verdicts = judged(rows, filters=filters if first == "zero_advantage" else filters[::-1])
    assert [verdicts[i]["reason"] for i in "abc"] == ["zero_advantage", "zero_advantage", "truncated"]


def test_a_detector_that_does_not_enforce_takes_nobody_out_of_the_group():
    rows = [trace("a"), trace("b", reward=0.0, is_truncated=True)]
    assert judged(rows)["a"]["keep"]


def test_a_trace_without_reward_is_no_member_of_a_group():
    verdicts = judged([trace("a", reward=None), trace("b")])
    assert verdicts["a"]["detected"] == [] and verdicts["b"]["reason"] == "zero_advantage"


def test_the_first_enforcing_filter_in_config_order_is_the_reason():
    rows = [trace("a", is_truncated=True)]
    both = [{"type": "truncated", "enforce": True}, {"type": "repetition", "window": 2, "enforce": True}]
    messages = exchange("a", logprobs=[0.0, 0.0])
    for filters in (both, both[::-1]):
        verdict = judged(rows, messages, filters)["a"]
        assert verdict["reason"] == filters[0]["type"]
        assert verdict["detected"] == [settings["type"] for settings in filters]


def test_untrainable_traces_are_not_trained_and_in_no_group():
    verdicts = judged([trace("a"), trace("b"), trace("judge", reward=0.0, trainable=False, is_truncated=True)])
    assert verdicts["judge"]["reason"] == "untrainable" and verdicts["judge"]["detected"] == ["truncated"]
    assert verdicts["a"]["reason"] == "zero_advantage"


def test_a_seat_that_never_moved_is_untrainable_and_no_fault_of_its_group():
    filters = [{"type": "errored"}, {"type": "incomplete_group"}, {"type": "zero_advantage"}]
    rows = [trace("a"), trace("b", reward=0.0), trace("silent", num_turns=0, num_output_tokens=0)]
    verdicts = judged(rows, [*exchange("a"), *exchange("b")], filters)
    assert (verdicts["silent"]["reason"], verdicts["silent"]["detected"]) == ("untrainable", ["no_turns"])
    assert verdicts["silent"]["evidence"] == {"no_turns": {"num_turns": 0}}
    assert verdicts["a"]["keep"] and verdicts["b"]["keep"], "neither errored nor incomplete"
    alone = judged([trace("a"), rows[2]], exchange("a"), filters)
    assert alone["a"]["reason"] == "zero_advantage", "it is in no comparison"
    lost = judged([failed("a", num_turns=0)], [], filters)["a"]
    assert (lost["reason"], lost["detected"]) == ("errored", ["errored"])


GIBBERISH = [{"type": "gibberish", "token_id_threshold": 100, "logprob_offset": 2.0, "enforce": True}]
BOUND = -log(VOCABULARY) - 2.0


@pytest.mark.parametrize(
    ("token", "logprob", "hit"),
    [(101, BOUND - 0.01, True), (100, BOUND - 0.01, False), (101, BOUND + 0.01, False), (101, -0.1, False)],
)
def test_gibberish_is_a_rare_and_unlikely_token(token, logprob, hit):
    messages = exchange("a", completion=[5, token, 6], logprobs=[-1.0, logprob, -1.0])
    verdict = judged([trace("a")], messages, GIBBERISH)["a"]
    assert verdict["keep"] is not hit
    if hit:
        evidence = verdict["evidence"]["gibberish"]
        assert (evidence["message"], evidence["position"], evidence["token_id"], evidence["tokens"]) == (1, 1, 101, 1)
        assert evidence["logprob"] == pytest.approx(logprob) and evidence["bound"] == pytest.approx(BOUND)


def test_gibberish_looks_at_sampled_tokens_only():
    messages = [message("a", 0, tokens=[900], logprobs=[-50.0]), message("a", 1, parent=0, sampled=True, tokens=[1])]
    assert judged([trace("a")], messages, GIBBERISH)["a"]["keep"]


def test_gibberish_needs_the_size_of_the_vocabulary():
    with pytest.raises(UnknownVocabulary, match=r"model\.vocab_size"):
        judged([trace("a")], vocab_size=0)


LOOP = [{"type": "repetition", "window": 3, "probability": 0.9, "enforce": True}]


@pytest.mark.parametrize(
    ("logprobs", "length"),
    [
        ([-0.01] * 3, 3),
        ([-0.01] * 2 + [-1.0] + [-0.01] * 2, None),
        ([-1.0] + [-0.01] * 4, 4),
        ([-0.01] * 3 + [-1.0] + [-0.01] * 5, 5),
        ([log(0.9) - 1e-3] * 9, None),
    ],
)
def test_repetition_is_a_long_run_of_near_certain_tokens(logprobs, length):
    messages = exchange("a", completion=range(len(logprobs)), logprobs=logprobs)
    verdict = judged([trace("a")], messages, LOOP)["a"]
    assert verdict["keep"] is (length is None)
    if length is not None:
        position = len(logprobs) - length if length > 3 else 0
        assert verdict["evidence"]["repetition"] == {"message": 1, "position": position, "length": length}


CERTAIN = {"sampled": True, "tokens": [1, 2], "logprobs": [0.0, 0.0]}


def test_a_run_goes_on_over_the_messages_of_a_trace():
    """The same call of a tool over and over, each too short to be a loop by itself; prime-rl finds it, too."""
    calls = [message("a", 0)]
    for number in range(1, 7, 2):
        calls += [message("a", number, parent=number - 1, **CERTAIN), message("a", number + 1, parent=number)]
    found = judged([trace("a")], calls, LOOP)["a"]
    assert found["evidence"]["repetition"] == {"message": 1, "position": 0, "length": 6} and not found["keep"]
    calls[3] |= {"logprobs": [0.0, -1.0]}
    assert judged([trace("a")], calls, LOOP)["a"]["evidence"]["repetition"]["length"] == 3
    calls[3] |= {"logprobs": [-1.0, -1.0]}
    assert judged([trace("a")], calls, LOOP)["a"]["keep"]


def test_a_run_is_of_one_branch():
    root, *others = (message("a", number, parent=0 if number else None, **CERTAIN) for number in range(3))
    assert judged([trace("a")], [root, *others], LOOP)["a"]["evidence"]["repetition"]["length"] == 4
    asked = message("a", 0)
    assert judged([trace("a")], [asked, *others], LOOP)["a"]["keep"], "two answers to one question are no run"


def test_a_run_is_of_one_trace_in_whatever_order_messages_lie():
    rows = [row for name in "ab" for row in (message(name, 0), message(name, 1, parent=0, **CERTAIN))]
    assert all(row["keep"] for row in judged([trace("a"), trace("b", reward=0.0)], rows, LOOP).values())
    more = [*rows, message("b", 2, parent=1, **CERTAIN)]
    for order in (more, more[::-1], more[::2] + more[1::2]):
        found = judged([trace("a"), trace("b", reward=0.0)], order, LOOP)
        assert found["a"]["keep"] and found["b"]["evidence"]["repetition"] == {"message": 1, "position": 0, "length": 4}


def test_a_token_that_was_not_sampled_neither_counts_nor_ends_a_run():
    mask = [False, True, True, False, True]
    answer = message("a", 0, sampled=True, tokens=range(5), logprobs=[0.0] * 5, mask=mask)
    found = judged([trace("a")], [answer], LOOP)["a"]
    assert found["evidence"]["repetition"] == {"message": 0, "position": 1, "length": 3}
    assert judged([trace("a")], [answer | {"mask": [False, True, False, False, True]}], LOOP)["a"]["keep"]


PLANS = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.tuples(st.booleans(), st.booleans()), max_size=4)), min_size=1, max_size=7
)


@given(PLANS, st.integers(1, 5))
def test_a_walk_over_every_branch_finds_the_same_loops(drawn, window):
    """A message's parent, and of each of its tokens whether it was sampled and near certain.

    As prime-rl walked: `RepetitionFilter.check` in its src/prime_rl/orchestrator/filters.py, which was there until
    61f2448d1.
    """
    rows = []
    for number, (above, tokens) in enumerate(drawn):
        columns = {"tokens": range(len(tokens)), "mask": [sampled for sampled, _ in tokens]}
        columns["logprobs"] = [0.0 if certain else -5.0 for _, certain in tokens]
        rows.append(message("a", number, parent=above % number if number else None, **columns))
        rows[-1]["sampled"] = any(columns["mask"])
    parents = {row["parent"] for row in rows}
    longest = 0
    for leaf in (number for number in range(len(rows)) if number not in parents):
        path, step = [], leaf
        while step is not None:
            path.insert(0, step)
            step = rows[step]["parent"]
        streak = 0
        for sampled, certain in (token for step in path for token in drawn[step][1]):
            if sampled:
                streak = streak + 1 if certain else 0
                longest = max(longest, streak)
    found = judged([trace("a")], rows, [{"type": "repetition", "window": window, "probability": 0.9}])["a"]
    length = found["evidence"].get("repetition", {"length": 0})["length"]
    assert length == (longest if longest >= window else 0)


@pytest.mark.parametrize(
    ("flags", "offsets", "starts", "lengths"),
    [
        ([1, 1, 0, 1, 1, 1, 0, 1], [0, 4, 4, 8], [0, 3, 4, 7], [2, 1, 2, 1]),
        ([1, 1], [0, 0, 1, 2, 2], [0, 1], [1, 1]),  # a row of one token is a run of its own, an empty one none
    ],
)
def test_runs_by_hand(flags, offsets, starts, lengths):
    start, length = runs(np.array(flags, bool), np.array(offsets))
    assert start.tolist() == starts and length.tolist() == lengths


def test_bounds_of_log_probs_are_outside():
    at = {"completion": [5, 6], "logprobs": [-0.5, -0.5]}
    certain = [{"type": "repetition", "window": 2, "probability": exp(-0.5)}]
    assert log(exp(-0.5)) == -0.5 and judged([trace("a")], exchange("a", **at), certain)["a"]["detected"] == []
    rare = [{"type": "gibberish", "token_id_threshold": 1, "logprob_offset": 0.5}]
    assert judged([trace("a")], exchange("a", **at), rare, vocab_size=1)["a"]["detected"] == []


def test_of_runs_of_equal_length_the_last_is_told():
    messages = exchange("a", completion=[5] * 200, logprobs=[-0.01, -0.01, -9.0, -0.01, -9.0] * 40)
    found = judged([trace("a")], messages, [{"type": "repetition", "window": 1, "probability": 0.9}])["a"]
    assert found["evidence"]["repetition"] == {"message": 1, "position": 195, "length": 2}


def talk(trace_id):
    """A question and two answers of one and two tokens."""
    return [
        message(trace_id, 0),
        message(trace_id, 1, parent=0, tokens=(4,), sampled=True),
        message(trace_id, 2, parent=1, tokens=(7, 8), sampled=True),
    ]


def test_each_rollout_is_found_with_its_own_unreadable_turns_in_whatever_order_messages_lie():
    flags = {"a": [2], "b": [], "c": [1, 2], "d": [1], "asked": [0]}
    traces = [trace(name, info=json.dumps({"parse_errors": numbers})) for name, numbers in flags.items()]
    rows = [talk(name) for name in flags]
    mixed = [each[number] for number in (1, 0, 2) for each in reversed(rows)]
    found = judged(traces, mixed, [{"type": "errored"}, {"type": "parse_error"}])
    assert {name: row["evidence"].get("parse_error") for name, row in found.items()} == {
        "a": {"messages": [2], "tokens": 2},
        "b": None,
        "c": {"messages": [1, 2], "tokens": 3},
        "d": {"messages": [1], "tokens": 1},
        "asked": None,  # what was asked is no turn of the policy
    }


def test_a_quarantined_trace_goes_first_and_no_group_sees_it():
    rows = [trace("a"), trace("b", reward=0.0), trace("c"), trace("d", trainable=False), failed("e")]
    said = {name: f"why {name}" for name in "bde"}
    verdicts = judged(rows, quarantined=said)
    assert [verdicts[name]["reason"] for name in "bde"] == ["quarantined"] * 3
    assert verdicts["b"]["evidence"]["quarantined"] == {"reason": "why b"}
    assert verdicts["e"]["detected"] == ["quarantined", "errored"]
    # Without b, the rest of the group are alike: a baseline of a and c alone has nothing to tell.
    assert verdicts["a"]["reason"] == verdicts["c"]["reason"] == "zero_advantage"
    assert verdicts["a"]["evidence"]["zero_advantage"] == {"spread": 0.0, "reward": 1.0, "members": 2}
    assert judged(rows)["a"]["keep"], "not so without the quarantine"


def test_a_quarantine_of_other_traces_changes_nothing():
    rows = [trace("a"), trace("b", reward=0.0)]
    assert judged(rows, quarantined={"elsewhere": "why"}) == judged(rows)


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.25, 1.0, None]), min_size=1, max_size=12),
    data=st.data(),
)
def test_credits_are_those_of_a_store_in_which_the_quarantined_traces_never_were(rewards, data):
    rows = [
        trace(f"t{n}", group_id=f"g{n % 3}", reward=reward)
        if reward is not None
        else failed(f"t{n}", group_id=f"g{n % 3}")
        for n, reward in enumerate(rewards)
    ]
    unfit = data.draw(st.sets(st.sampled_from([row["trace_id"] for row in rows])))
    rest = [row for row in rows if row["trace_id"] not in unfit]
    assert credited(rows, dict.fromkeys(unfit, "why")).equals(credited(rest, {}))


def credited(rows, quarantined):
    """The credits of these traces, by the group's mean as the baseline."""
    messages = [row for one in rows for row in exchange(one["trace_id"])]
    tables = {"traces": table("traces", rows), "messages": table("messages", messages)}
    tables |= filtering(tables, view(STAGE, model={"vocab_size": VOCABULARY}), parameters=quarantined)
    return advantage(tables, view(ADVANTAGE, algorithm={"type": "grpo"}))["samples"]


def test_credits_tell_a_quarantine_from_none():
    rows = [trace("a"), trace("b", reward=0.0), trace("c", reward=0.25)]
    assert not credited(rows, {}).slice(0, 2).equals(credited(rows, {"c": "why"}))


def test_a_message_without_its_trace_stops_the_stage():
    with pytest.raises(BrokenGraph, match="table messages, column trace_id: stray"):
        judged([trace("a")], exchange("stray"))


def test_the_stage_declares_its_tables():
    assert set(STAGE.reads) | set(STAGE.writes) <= set(TABLES)
