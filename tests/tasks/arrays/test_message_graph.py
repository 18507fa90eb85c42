"""Message graphs: the branches of forks, and graphs that are none."""

import itertools

import numpy as np
import pytest

from tasks.arrays.message_graph import BrokenGraph, find_branches
from tests.fixtures.builders import message, table


def branches_of(*graphs):
    """Branches of one trace per graph; a graph lists each message's parent."""
    rows = [message(f"t{t}", n, parent=p) for t, parents in enumerate(graphs) for n, p in enumerate(parents)]
    owner = np.array([t for t, parents in enumerate(graphs) for _ in parents], np.int64)
    return find_branches(table("messages", rows), owner)


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
    found = find_branches(table("messages", rows), np.array([0, 1, 0, 1]))
    assert paths(found) == [[0], [2], [1, 3]]
    assert found.owner.tolist() == [0, 0, 1] and found.number.tolist() == [0, 1, 0]


def test_rows_of_a_trace_may_come_in_any_order():
    rows = [message("t0", 2, parent=0), message("t0", 0), message("t0", 1, parent=0)]
    found = find_branches(table("messages", rows), np.array([0, 0, 0]))
    assert paths(found) == [[1, 2], [1, 0]] and found.number.tolist() == [0, 1]


def test_nothing_has_no_branches():
    assert paths(branches_of()) == []


@pytest.mark.parametrize("parents", [[None, 7], [0], [1, None], [None, 1]])
def test_a_parent_must_be_an_earlier_message(parents):
    with pytest.raises(BrokenGraph, match=r"column parent.*not an earlier message"):
        branches_of(parents)


def test_a_doubled_message_is_refused():
    rows = [message("t0", 0), message("t0", 0)]
    with pytest.raises(BrokenGraph, match="1 messages are there twice"):
        find_branches(table("messages", rows), np.array([0, 0]))
