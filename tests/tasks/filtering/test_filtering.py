"""Filtering: what each filter finds, what it says about it, and what is kept."""

import json
from math import exp, log
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.filters import FilterConfig
from tasks.arrays.message_graph import BrokenGraph
from tasks.filtering.filters import FILTERS
from tests.fixtures.builders import exchange, failed, message, trace
from tests.fixtures.stages import VOCABULARY, judged, tables_of, through_advantage


def reasons(rows, **options):
    """Why each trace is dropped, by its id; None of a kept one."""
    return {name: verdict["reason"] for name, verdict in judged(rows, **options).items()}


def test_every_filter_of_the_config_has_a_detector():
    kinds = get_args(get_args(FilterConfig)[0])
    assert {get_args(kind.model_fields["type"].annotation)[0] for kind in kinds} == set(FILTERS)


def test_a_clean_trace_is_kept():
    verdict = judged([trace("a", reward=1.0), trace("b", reward=0.0)])["a"]
    assert verdict["keep"] and verdict["reason"] is None and verdict["detected"] == [] and verdict["evidence"] == {}
    assert judged([], []) == {}


@pytest.mark.parametrize("filters", [None, [], [{"type": "truncated"}]])
def test_errored_traces_go_even_if_no_filter_asks_for_it(filters):
    verdicts = judged([failed("a", error_class="infrastructure"), trace("b"), trace("c", reward=0.0)], filters=filters)
    assert verdicts["a"]["reason"] == "errored" and verdicts["b"]["keep"]
    assert verdicts["a"]["evidence"]["errored"] == {"error_class": "infrastructure", "error_type": "TimeoutError"}


def test_truncated_is_recorded_and_excludes_only_when_it_enforces():
    rows = [trace("a", is_truncated=True, stop_condition="length"), trace("b", reward=0.0)]
    noted = judged(rows)
    assert noted["a"]["keep"] and noted["a"]["detected"] == ["truncated"]
    assert noted["a"]["evidence"]["truncated"] == {"stop_condition": "length", "num_output_tokens": 2}
    assert noted["b"]["keep"], "the group is compared with it"
    enforced = reasons([*rows, trace("c")], filters=[{"type": "truncated", "enforce": True}])
    assert enforced["a"] == "truncated" and enforced["b"] is None


def test_a_group_of_equal_rewards_teaches_nothing():
    rows = [trace("a"), trace("b"), trace("c", group_id="g1"), trace("d", group_id="g1", reward=0.5)]
    assert reasons(rows) == {"a": "zero_advantage", "b": "zero_advantage", "c": None, "d": None}
    assert judged(rows)["a"]["evidence"]["zero_advantage"] == {"spread": 0.0, "reward": 1.0, "members": 2}


@pytest.mark.parametrize(("tolerance", "reason"), [(0.24, None), (0.25, "zero_advantage")])
def test_the_spread_may_be_up_to_the_tolerance(tolerance, reason):
    filters = [{"type": "zero_advantage", "tolerance": tolerance}]
    assert reasons([trace("a", reward=0.5), trace("b", reward=0.75)], filters=filters)["a"] == reason


def test_an_errored_member_does_not_make_a_group_worth_comparing():
    verdicts = judged([trace("a"), trace("b"), failed("c", reward=0.0)])
    assert verdicts["a"]["reason"] == "zero_advantage"
    assert verdicts["c"]["reason"] == "errored" and verdicts["c"]["detected"] == ["errored"]


@pytest.mark.parametrize("order", [1, -1])
def test_groups_are_judged_on_what_the_other_filters_leave(order):
    filters = [{"type": "zero_advantage"}, {"type": "truncated", "enforce": True}][::order]
    rows = [trace("a"), trace("b"), trace("c", reward=0.0, is_truncated=True)]
    assert reasons(rows, filters=filters) == {"a": "zero_advantage", "b": "zero_advantage", "c": "truncated"}


@pytest.mark.parametrize("types", [["truncated", "repetition"], ["repetition", "truncated"]])
def test_the_first_enforcing_filter_in_config_order_is_the_reason(types):
    settings = {"truncated": {}, "repetition": {"window": 2}}
    filters = [{"type": name, "enforce": True} | settings[name] for name in types]
    verdict = judged([trace("a", is_truncated=True)], exchange("a", logprobs=[0.0, 0.0]), filters)["a"]
    assert verdict["reason"] == types[0] and verdict["detected"] == types


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


def judged_alone(messages, *filters, **options):
    """The verdict on the only trace, a."""
    return judged([trace("a")], messages, filters, **options)["a"]


GIBBERISH = {"type": "gibberish", "token_id_threshold": 100, "logprob_offset": 2.0, "enforce": True}
BOUND = -log(VOCABULARY) - 2.0


@pytest.mark.parametrize(
    ("token", "logprob", "hit"),
    [(101, BOUND - 0.01, True), (100, BOUND - 0.01, False), (101, BOUND + 0.01, False), (101, -0.1, False)],
)
def test_gibberish_is_a_rare_and_unlikely_token(token, logprob, hit):
    verdict = judged_alone(exchange("a", completion=[5, token, 6], logprobs=[-1.0, logprob, -1.0]), GIBBERISH)
    assert verdict["keep"] is not hit
    if hit:
        evidence = verdict["evidence"]["gibberish"]
        assert (evidence["message"], evidence["position"], evidence["token_id"], evidence["tokens"]) == (1, 1, 101, 1)
        assert evidence["logprob"] == pytest.approx(logprob) and evidence["bound"] == pytest.approx(BOUND)


def test_gibberish_looks_at_sampled_tokens_only():
    messages = [message("a", 0, tokens=[900], logprobs=[-50.0]), message("a", 1, parent=0, sampled=True, tokens=[1])]
    assert judged_alone(messages, GIBBERISH)["keep"]


def loop(messages, **settings):
    """The message, position and length of the loop in the only trace, which goes exactly where one is found."""
    section = {"type": "repetition", "window": 3, "probability": 0.9, "enforce": True} | settings
    verdict = judged_alone(messages, section)
    found = verdict["evidence"].get("repetition")
    assert verdict["keep"] is (found is None)
    return found and (found["message"], found["position"], found["length"])


@pytest.mark.parametrize(
    ("logprobs", "position", "length"),
    [
        ([-0.01] * 3, 0, 3),
        ([-0.01] * 2 + [-1.0] + [-0.01] * 2, None, None),
        ([-1.0] + [-0.01] * 4, 1, 4),
        ([-0.01] * 3 + [-1.0] + [-0.01] * 5, 4, 5),
        ([log(0.9) - 1e-3] * 9, None, None),
    ],
)
def test_repetition_is_a_long_run_of_near_certain_tokens(logprobs, position, length):
    found = loop(exchange("a", completion=range(len(logprobs)), logprobs=logprobs))
    assert found == (length and (1, position, length))


CERTAIN = {"sampled": True, "tokens": [1, 2], "logprobs": [0.0, 0.0]}


def test_a_run_goes_on_over_the_messages_of_a_trace():
    """The same call of a tool over and over, each too short to be a loop by itself; prime-rl finds it, too."""
    calls = [message("a", 0)]
    for number in range(1, 7, 2):
        calls += [message("a", number, parent=number - 1, **CERTAIN), message("a", number + 1, parent=number)]
    assert loop(calls) == (1, 0, 6)


def test_a_run_is_of_one_trace_in_whatever_order_messages_lie():
    rows = [row for name in "ab" for row in (message(name, 0), message(name, 1, parent=0, **CERTAIN))]
    section = {"type": "repetition", "window": 3, "probability": 0.9, "enforce": True}
    traces = [trace("a"), trace("b", reward=0.0)]
    assert all(row["keep"] for row in judged(traces, rows, [section]).values())
    more = [*rows, message("b", 2, parent=1, **CERTAIN)]
    for order in (more, more[::-1], more[::2] + more[1::2]):
        found = judged(traces, order, [section])
        assert found["a"]["keep"] and found["b"]["evidence"]["repetition"] == {"message": 1, "position": 0, "length": 4}


def test_a_token_that_was_not_sampled_neither_counts_nor_ends_a_run():
    answer = message("a", 0, sampled=True, tokens=range(5), logprobs=[0.0] * 5, mask=[False, True, True, False, True])
    assert loop([answer]) == (0, 1, 3)
    assert loop([answer | {"mask": [False, True, False, False, True]}]) is None


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
    found = loop(rows, window=window)
    assert (found[2] if found else 0) == (longest if longest >= window else 0)


def test_bounds_of_log_probs_are_outside():
    messages = exchange("a", completion=[5, 6], logprobs=[-0.5, -0.5])
    assert log(exp(-0.5)) == -0.5 and loop(messages, window=2, probability=exp(-0.5)) is None
    rare = {"type": "gibberish", "token_id_threshold": 1, "logprob_offset": 0.5}
    assert judged_alone(messages, rare, vocab_size=1)["detected"] == []


def test_of_runs_of_equal_length_the_last_is_told():
    messages = exchange("a", completion=[5] * 200, logprobs=[-0.01, -0.01, -9.0, -0.01, -9.0] * 40)
    assert loop(messages, window=1) == (1, 195, 2)


def test_each_rollout_is_found_with_its_own_unreadable_turns_in_whatever_order_messages_lie():
    flags = {"a": [2], "b": [], "c": [1, 2], "d": [1], "asked": [0]}
    traces = [trace(name, info=json.dumps({"parse_errors": numbers})) for name, numbers in flags.items()]
    columns = [{}, {"parent": 0, "tokens": (4,), "sampled": True}, {"parent": 1, "tokens": (7, 8), "sampled": True}]
    mixed = [message(name, number, **columns[number]) for number in (1, 0, 2) for name in reversed(flags)]
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
    verdicts = judged(rows, quarantined={name: f"why {name}" for name in "bde"})
    assert [verdicts[name]["reason"] for name in "bde"] == ["quarantined"] * 3
    assert verdicts["b"]["evidence"]["quarantined"] == {"reason": "why b"}
    assert verdicts["e"]["detected"] == ["quarantined", "errored"]
    # Without b, the rest of the group are alike: a baseline of a and c alone has nothing to tell.
    assert verdicts["a"]["reason"] == verdicts["c"]["reason"] == "zero_advantage"
    assert verdicts["a"]["evidence"]["zero_advantage"] == {"spread": 0.0, "reward": 1.0, "members": 2}
    assert judged(rows)["a"]["keep"], "not so without the quarantine"


@given(rewards=st.lists(st.sampled_from([0.0, 0.25, 1.0, None]), min_size=1, max_size=12), data=st.data())
def test_credits_are_those_of_a_store_in_which_the_quarantined_traces_never_were(rewards, data):
    rows = [
        (failed if reward is None else trace)(f"t{n}", group_id=f"g{n % 3}", reward=reward)
        for n, reward in enumerate(rewards)
    ]
    unfit = data.draw(st.sets(st.sampled_from([row["trace_id"] for row in rows])))
    rest = [row for row in rows if row["trace_id"] not in unfit]
    assert credited(rows, dict.fromkeys(unfit, "why")).equals(credited(rest, {}))


def credited(rows, quarantined):
    """The credits of these traces, by the group's mean as the baseline."""
    return through_advantage(tables_of(rows), quarantined)["samples"]


def test_a_message_without_its_trace_stops_the_stage():
    with pytest.raises(BrokenGraph, match="table messages, column trace_id: stray"):
        judged([trace("a")], exchange("stray"))
