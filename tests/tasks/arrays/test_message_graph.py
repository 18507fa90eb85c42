"""Message graphs: the branches of forks, graphs that are none, and attempts at a summary that a harness threw away.

Such attempts are not trained on, while all turns before and after them are.
"""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from tasks.arrays.message_graph import BrokenGraph, drop_rejected, find_branches
from tests.fixtures.builders import message, table, trace
from tests.fixtures.stages import credited


def branches_of(*graphs):
    """Branches of one trace per graph; a graph lists each message's parent."""
    rows = [message(f"t{t}", n, parent=p) for t, parents in enumerate(graphs) for n, p in enumerate(parents)]
    return branches_by_owner(rows, [t for t, parents in enumerate(graphs) for _ in parents])


def branches_by_owner(rows, owners):
    return find_branches(table("messages", rows), np.array(owners, np.int64))


def paths(branches):
    borders = branches.path.offsets
    return [branches.path.values[a:b].tolist() for a, b in itertools.pairwise(borders)]


def test_a_line_is_one_branch():
    assert paths(branches_of([None, 0, 1])) == [[0, 1, 2]]


def test_a_fork_has_a_branch_for_each_leaf_in_node_order():
    found = branches_of([None, 0, 1, 0, 3, 3])
    assert paths(found) == [[0, 1, 2], [0, 3, 4], [0, 3, 5]]
    assert found.number.tolist() == [0, 1, 2]
    assert found.first.tolist() == [True, True, True, False, True, True, False, False, True]


def test_traces_may_be_interleaved_and_have_several_roots():
    rows = [message("t0", 0), message("t1", 0), message("t0", 1), message("t1", 1, parent=0)]
    found = branches_by_owner(rows, [0, 1, 0, 1])
    assert paths(found) == [[0], [2], [1, 3]]
    assert found.owner.tolist() == [0, 0, 1] and found.number.tolist() == [0, 1, 0]


def test_rows_of_a_trace_may_come_in_any_order():
    rows = [message("t0", 2, parent=0), message("t0", 0), message("t0", 1, parent=0)]
    found = branches_by_owner(rows, [0, 0, 0])
    assert paths(found) == [[1, 2], [1, 0]] and found.number.tolist() == [0, 1]


@pytest.mark.parametrize("parents", [[None, 7], [0], [1, None], [None, 1]])
def test_a_parent_must_be_an_earlier_message(parents):
    with pytest.raises(BrokenGraph, match=r"column parent.*not an earlier message"):
        branches_of(parents)


def record(links, num_nodes):
    """A trace's record; `links` are (type, from, to), by number of message."""
    nodes = [
        {"semantic_parents": [{"node": a, "type": kind} for kind, a, b in links if b == n]} for n in range(num_nodes)
    ]
    return json.dumps({"nodes": nodes})


def chain(start, parent, *, length=2):
    """A message and the sampled reply to it, `length` tokens long; the reply's number is `start` + 1."""
    tokens = range(10 * start, 10 * start + length)
    return [message(number=start, parent=parent), message(number=start + 1, parent=start, tokens=tokens, sampled=True)]


# 1 is a turn; 3 and 5 are summaries of it; 7 goes on from a root of its own.
TWICE = [*chain(0, None), *chain(2, 1), *chain(4, 1), *chain(6, None)]
LINKS = [("compaction_attempt", 1, 3), ("compaction_attempt", 1, 5), ("compaction", 5, 7)]


@pytest.mark.parametrize(
    ("rows", "links", "kept"),
    [
        (TWICE, [], [0, 1, 2, 3, 4, 5, 6, 7]),
        (TWICE, LINKS, [0, 1, 4, 5, 6, 7]),
        (TWICE, [*LINKS[:2], ("compaction", 3, 7)], [0, 1, 2, 3, 6, 7]),
        (TWICE, LINKS[:2], [0, 1, 6, 7]),
        (TWICE, [("continuation", 1, 3), ("subagent_return", 3, 7)], [0, 1, 2, 3, 4, 5, 6, 7]),
        # The conversation went on behind an attempt all the same: nothing is taken out of the middle of a branch.
        (TWICE[:4], [("compaction_attempt", 0, 1)], [0, 1, 2, 3]),
        # The rollout ended with an attempt: the turns before it led to the reward.
        (TWICE[:4], LINKS[:1], [0, 1]),
        # One attempt behind another; what was asked for both goes, and what was told another reply stays.
        (TWICE[:4] + chain(4, 3), [*LINKS[:1], ("compaction_attempt", 3, 5)], [0, 1]),
        ([*TWICE[:3], message(number=3, parent=1, sampled=True)], LINKS[:1], [0, 1, 2]),
        # Nothing but an attempt: a trace without messages is none.
        (TWICE[:2], [("compaction_attempt", 0, 1)], [0]),
    ],
)
def test_what_stays_by_hand(rows, links, kept):
    traces = table("traces", [trace(record=record(links, len(rows)))])
    found = drop_rejected(traces, table("messages", rows[::-1]))
    assert found["message"].to_pylist() == kept[::-1], "in their order"


def test_only_traces_with_an_attempt_lose_any():
    traces = [trace("t0", record=record(LINKS, 8)), trace("t1"), trace("t2", record=record(LINKS[2:], 8))]
    rows = [row | {"trace_id": name} for row in TWICE for name in ("t0", "t1", "t2")]
    found = drop_rejected(table("traces", traces), table("messages", rows))
    assert Counter(found["trace_id"].to_pylist()) == {"t0": 6, "t1": 8, "t2": 8}


def test_a_text_that_speaks_of_attempts_is_no_attempt():
    said = trace(record=json.dumps({"nodes": [{"semantic_parents": []}] * 8, "note": "compaction_attempt"}))
    assert drop_rejected(table("traces", [said]), table("messages", TWICE)).num_rows == 8


def test_tokens_of_a_rejected_attempt_have_no_weight_and_those_before_it_have_theirs_once():
    rows = [*chain(0, None), *chain(2, 1, length=5), *chain(4, 1), *chain(6, None)]
    others = [row | {"trace_id": "t1"} for row in chain(0, None)]
    traces = [trace(reward=1.0, record=record(LINKS, 8)), trace("t1", reward=0.0)]
    found = [row for row in credited(traces, [*rows, *others]) if row["trace_id"] == "t0"]
    assert [row["path"] for row in found] == [[0, 1, 4, 5], [6, 7]]
    assert [row["rl_weights"] for row in found] == [[0, 0, 0, 1, 1, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1]]
    assert [row["advantage"] for row in found] == [0.5, 0.5], "the baseline is as before"
