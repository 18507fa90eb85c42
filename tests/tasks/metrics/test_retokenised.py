"""Re-tokenised turns, by hand on small graphs."""

import json

import pytest

from tasks.metrics.rollouts import retokenised_turns
from tests.fixtures.builders import message, table


def said(number, parent, role="assistant", content="yes", sampled=False, trace="t0", **others):
    body = {"role": role, "content": content} | others
    return message(trace, number, parent=parent, sampled=sampled, role=role, body=json.dumps(body), content=content)


ASKED = [said(0, None, "user", "well?"), said(1, 0, sampled=True)]
BRIDGED = [*ASKED, said(2, 1, "user", "again"), said(3, 2, sampled=True)]
AGAIN = [*ASKED, said(2, 0), said(3, 2, "user", "again"), said(4, 3, sampled=True)]


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        (ASKED, 0),
        (BRIDGED, 0),
        (AGAIN, 1),
        # The prompt, too, came out as other tokens: the same conversation all the same.
        (
            [*ASKED, said(2, None, "user", "well?"), said(3, 2), said(4, 3, "user", "again"), said(5, 4, sampled=True)],
            1,
        ),
        # A reply that nobody sampled: an example in the prompt, or a history that was written anew.
        ([*ASKED, said(2, 0, content="no"), said(3, 2, "user", "again"), said(4, 3, sampled=True)], 0),
        ([said(0, None, "user", "a"), said(1, 0), said(2, 1, "user", "well?"), said(3, 2, sampled=True)], 0),
        # The same words after another conversation.
        ([*ASKED, said(2, None, "user", "who?"), said(3, 2), said(4, 3, "user", "again"), said(5, 4, sampled=True)], 0),
        # Both replies of three turns.
        ([*AGAIN, said(5, 3), said(6, 5, "user", "more"), said(7, 6, sampled=True)], 2),
        # A thought that a template takes out is no other reply.
        ([ASKED[0], said(1, 0, sampled=True, reasoning_content="hm"), *AGAIN[2:]], 1),
        # The same call, written otherwise; None and no text are the same.
        (
            [
                ASKED[0],
                said(1, 0, sampled=True, content=None, tool_calls=[{"id": "a", "name": "f", "arguments": '{"x":1}'}]),
                said(2, 0, content="", tool_calls=[{"id": "a", "name": "f", "arguments": '{ "x": 1 }'}]),
                said(3, 2, "tool", "3", tool_call_id="a"),
                said(4, 3, sampled=True),
            ],
            1,
        ),
        ([ASKED[0], said(1, 0, "user", "yes", sampled=False), said(2, 0, sampled=True)], 0),
    ],
)
def test_by_hand(rows, count):
    assert retokenised_turns(table("messages", rows)) == ({"t0": count} if count else {})


def test_traces_are_told_apart_and_their_order_does_not_matter():
    other = [row | {"trace_id": "t1"} for row in BRIDGED]
    rows = [row for pair in zip(other, AGAIN, strict=False) for row in pair] + AGAIN[4:]
    assert retokenised_turns(table("messages", rows[::-1])) == {"t0": 1}
