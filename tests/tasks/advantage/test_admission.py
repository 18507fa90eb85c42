"""What may not be trained on: turns that the environment could not read, and groups that the gate refuses."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import SAMPLES
from tasks.advantage.algorithms.credit import Credit, GroupedTraces
from tasks.advantage.stage import STAGE, silence
from tasks.arrays.parse_errors import StrangeFlag
from tasks.arrays.ragged import Ragged
from tests.fixtures.builders import exactly, exchange, message, table, trace, view
from tests.fixtures.stages import advantage, group, tables_of

OVER_TOKENS = {"type": "reinforce_pp", "statistics": "tokens"}
WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
EXTRAS = {"extras": {"parse_error": True}}
# Where the flag may be: of message 1 in its body, in the trace's record, in the environment's notes.
PLACES = [
    ({"body": json.dumps(EXTRAS)}, {}),
    ({}, {"record": json.dumps({"nodes": [{}, EXTRAS, {}, {}]})}),
    ({}, {"info": json.dumps({"parse_errors": [1]})}),
]


def turns(trace_id, flagged=None):
    """A conversation of two sampled turns; the columns given are those of the first."""
    first = message(trace_id, 1, parent=0, tokens=(4, 5), sampled=True) | (flagged or {})
    return [
        *[message(trace_id, 0), first, message(trace_id, 2, parent=1, tokens=(6,))],
        message(trace_id, 3, parent=2, tokens=(7, 8, 9), sampled=True),
    ]


def pair(of_message=None, **of_trace):
    """The rows of two conversations, of which a earned more; the columns given are those of a and its first turn."""
    return [trace("a", **of_trace), trace("b", reward=0.0)], [*turns("a", of_message), *turns("b")]


FLAGGED = {"info": json.dumps({"parse_errors": [1]})}


def credited(traces, messages=None, **sections):
    rows = advantage(tables_of(traces, messages), view(STAGE, **sections))["samples"]
    check_rows(rows, SAMPLES, RowPlace("samples"))
    return {row["sample_id"]: row for row in rows.to_pylist()}


@pytest.mark.parametrize(("of_message", "of_trace"), PLACES, ids=["body", "record", "info"])
def test_only_the_turn_that_could_not_be_read_is_masked(of_message, of_trace):
    rows = credited(*pair(of_message, **of_trace))
    assert rows["a/0"]["rl_weights"] == [0.0] * 3 + [0.0, 0.0] + [0.0] + [1.0] * 3
    assert rows["a/0"]["advantages"] == [0.0] * 6 + [0.5] * 3
    assert rows["b/0"]["rl_weights"] == [0.0] * 3 + [1.0, 1.0] + [0.0] + [1.0] * 3
    assert rows["a/0"]["advantage"] == 0.5, "its reward counts in the baseline as before"


def test_such_a_turn_counts_in_no_statistic_of_tokens():
    """Statistics of a batch weigh each rollout by its sampled tokens, without those that nobody could read."""
    unsampled = {"sampled": False, "mask": [False] * 2}
    found, expected, plain = (
        {name: row["advantage"] for name, row in credited(*rows, algorithm=OVER_TOKENS).items()}
        for rows in (pair(**FLAGGED), pair(unsampled), pair())
    )
    assert found == expected != plain


@pytest.mark.parametrize(
    "of_trace",
    [
        *({"info": {"parse_errors": each}} for each in ([0, 2], [], 2, True, ["no closing tag"])),
        *({"record": {"nodes": each}} for each in ([{}, {"extras": {"parse_error": False}}], ["parse_error"])),
        {"record": {"nodes": None, "note": "parse_error"}},
        {"record": ["parse_error"]},
        {"info": ["parse_errors"]},
        {"info": {"note": "no parse_error"}},
    ],
    ids=str,
)
def test_what_is_no_flag_of_a_sampled_turn_masks_nothing(of_trace):
    columns = {name: json.dumps(value) for name, value in of_trace.items()}
    assert credited(*pair(**columns)) == credited(*pair())


@pytest.mark.parametrize("number", [4, -1, 99])
def test_a_flag_of_a_message_that_is_not_there_stops_the_stage(number):
    said = (
        f"table traces: trace a flags message {number} as unreadable (parse_error), and has none of that number. "
        "Nothing was trained; all that was sampled is safe. Let the environment name messages by their place in the "
        "trace, from 0 with the first of the prompt; leave rollouts recorded so far out with stagecoach quarantine."
    )
    with pytest.raises(StrangeFlag, match=exactly(said)):
        credited(*pair(info=json.dumps({"parse_errors": [1, number]})))


def test_a_turn_that_is_masked_makes_no_group_silent_to_the_gate():
    assert sum(credited(*pair(**FLAGGED), admission={})["a/0"]["rl_weights"]) == 3


def two_groups(rewards_g, rewards_h):
    return [*group(*rewards_g, group_id="g"), *group(*rewards_h, group_id="h")]


def trained(*arguments, **sections):
    """Whether any token of each trace has weight."""
    return [any(row["rl_weights"]) for row in credited(*arguments, **sections).values()]


def test_a_group_whose_advantages_are_all_zero_is_refused_and_shows_it():
    rows = credited(two_groups([0.1, 0.1, 0.1], [0.0, 1.0]), admission={})
    for stream in ("rl_weights", "advantages"):
        assert [any(row[stream]) for row in rows.values()] == [False] * 3 + [True] * 2, stream
    for number in range(3):
        row = rows[f"g-{number}/0"]
        assert (row["advantage"], row["baseline"]) == (pytest.approx(0), pytest.approx(0.1))


def test_silence_takes_every_component_and_the_signal():
    traces, messages = table("traces", [trace("a")]), table("messages", exchange("a")[:1])
    kept = GroupedTraces(traces, messages, np.zeros(1, np.int64), Ragged(np.ones(3, np.bool_), np.array([0, 3])))
    one = np.ones(3, np.float32)
    credit = Credit(np.zeros(1), np.ones(1), one, 2 * one, 3 * one, 4 * one)
    found = silence(kept, credit, np.array([False, True, False]))
    streams = [found.rl, found.ce, found.ref_kl, found.signal]
    assert [stream.tolist() for stream in streams] == [[n, 0, n] for n in (1, 2, 3, 4)]


def test_a_group_that_rl_does_not_train_is_admitted():
    rows = credited(two_groups([0.5, 0.5], [0.0, 0.0]), admission={}, algorithm={"type": "supervised"})
    assert all(any(row["ce_weights"]) for row in rows.values())


REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=4)


@given(one=REWARDS, other=REWARDS, low=st.sampled_from([-1.0, -0.3, 0.0]), high=st.sampled_from([0.0, 0.3, 1.0]))
def test_the_gate_is_what_a_loop_over_groups_says(one, other, low, high):
    rows = two_groups(one, other)
    open_, gated = credited(rows), credited(rows, admission={"reject_min": low, "reject_max": high})
    for group_id in "gh":
        of_group = [name for name in open_ if name[0] == group_id]
        worth = [
            value
            for name in of_group
            for value, weight in zip(open_[name]["advantages"], open_[name]["rl_weights"], strict=True)
            if weight
        ]
        refused = all(low - 1e-6 <= value <= high + 1e-6 for value in worth)
        for name in of_group:
            silent = {stream: [0.0] * open_[name]["num_tokens"] for stream in (*WEIGHTS, "advantages")}
            assert gated[name] == open_[name] | (silent if refused else {})


@pytest.mark.parametrize("end", [0.1, 0.3, 1e6 / 3])
def test_the_ends_of_the_range_hold_for_advantages_that_single_precision_rounds(end):
    rows = two_groups([-end, end], [-1.01 * end, 1.01 * end])
    assert trained(rows, admission={"reject_min": -end, "reject_max": end}) == [False, False, True, True]


def test_a_custom_algorithm_that_weighs_every_token_gives_none_to_such_a_turn():
    algorithm = {"type": "custom", "function": "tests.fixtures.masks:everywhere"}
    row = credited([trace("a")], turns("a", PLACES[0][0]), algorithm=algorithm)["a/0"]
    assert row["ce_weights"] == row["advantages"] == [1.0] * 3 + [0.0, 0.0] + [1.0] * 4
