"""Which policy sampled which token, from the engine's answers to the rows."""

import pytest

from tasks.inference.trace_rows.rows import (
    POLICIES,
    RolloutOrigin,
    UnknownPolicy,
    _policy_runs,
    require_policies,
    trace_tables,
)
from tests.fixtures.builders import exchange, message, trace

VERSIONS = {"old": 3, "new": 4, "newer": 6}
ORIGIN = RolloutOrigin({}, "new", 4, 7, 1.0, VERSIONS)


def reply(trace_id, number, runs, mask=None):
    """A sampled message with what the engine said of its policies."""
    count = sum(length for _, length in runs)
    row = message(trace_id, number, parent=number - 1, tokens=range(count), sampled=True)
    row |= {} if mask is None else {"mask": mask, "token_ids": [0] * len(mask), "logprobs": [0.0] * len(mask)}
    return row | {POLICIES: _policy_runs(row, runs, VERSIONS)}


def short(rows):
    names = ("trace_id", "message", "start", "num_tokens", "policy_key", "policy_version")
    return [tuple(row[name] for name in names) for row in rows]


def test_runs_are_places_of_sampled_tokens():
    row = reply("t", 1, [("old", 2), ("newer", 3)], [False, False, True, True, True, True, True])
    assert short(row[POLICIES]) == [("t", 1, 2, 2, "old", 3), ("t", 1, 4, 3, "newer", 6)]
    row = reply("t", 1, [("old", 3), ("new", 1)], [True, False, True, True, False, True])
    assert short(row[POLICIES]) == [("t", 1, 0, 1, "old", 3), ("t", 1, 2, 2, "old", 3), ("t", 1, 5, 1, "new", 4)]


def test_only_traces_of_several_policies_have_rows_and_then_of_all_their_tokens():
    several, one, frozen = ("several", "one", "frozen")
    messages = [
        *exchange(several),
        reply(several, 2, [("old", 3)]),
        reply(several, 3, [("old", 1), ("new", 1)]),
        reply(one, 0, [("new", 2)]),
        reply(frozen, 0, [("old", 1), ("new", 1)]),
    ]
    traces = [trace(several), trace(one), trace(frozen, policy_key="")]
    tables = trace_tables(traces, messages)
    expected = [(several, 2, 0, 3, "old", 3), (several, 3, 0, 1, "old", 3), (several, 3, 1, 1, "new", 4)]
    assert short(tables["token_policies"].to_pylist()) == expected
    assert "token_policies" not in trace_tables(traces[1:], messages[4:])


def test_a_rollout_is_of_the_oldest_policy_that_sampled_a_part():
    assert ORIGIN.of_oldest([]) is ORIGIN
    mixed = ORIGIN.of_oldest(["newer", "old", "new"])
    assert (mixed.policy_key, mixed.policy_version, mixed.step) == ("old", 3, 7)
    with pytest.raises(UnknownPolicy, match=r"\['another'\]"):
        ORIGIN.of_oldest(["new", "another"])
    # Where weights are never exchanged, nobody asks.
    plain = RolloutOrigin({}, "new", 4, 7, 1.0)
    assert plain.of_oldest(["another"]) is plain


def test_a_token_without_a_policy_is_found():
    row = reply("t", 1, [("new", 2)])
    require_policies(trace("t"), [message("t", 0), row])
    for wrong in (row | {POLICIES: []}, {key: row[key] for key in row if key != POLICIES}, row | {"mask": [True] * 3}):
        with pytest.raises(UnknownPolicy, match=r"trace 't', message 1: . tokens were sampled"):
            require_policies(trace("t"), [wrong])
