"""Names to keep sorted: conversations and scores by hand, demonstrations, and rollouts of several turns."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_alphabet_sort.demonstrations import TAG, demonstrations, words
from sample_alphabet_sort.lists import (
    NAMES,
    Conversation,
    Limits,
    asked,
    conversations,
    listed,
    score,
    similarity,
    tagged,
)

from tests.environments.scripted import played
from tests.fixtures.commands import cases

pytestmark = pytest.mark.engine

TALK = Conversation((("Eve", "Bob"), ("Ann",), ("Kim", "Abe")))
LIMITS = Limits(min_turns=2, max_turns=3, min_words=1, max_words=2, num_names=26)


def test_a_conversation_by_hand():
    assert TALK.answers == [["Bob", "Eve"], ["Ann", "Bob", "Eve"], ["Abe", "Ann", "Bob", "Eve", "Kim"]]
    assert asked(TALK.turns[0], "sorted", first=True) == "Sort inside <sorted>: Eve Bob"
    assert asked(TALK.turns[1], "x", first=False) == "Add inside <x>: Ann"


def test_names_differ_and_the_first_do_by_their_first_letter():
    assert len(set(NAMES)) == len(NAMES) == 104
    for begin in range(0, 104, 26):
        letters = [name[0] for name in NAMES[begin : begin + 26]]
        assert letters == sorted(set(letters)) and len(letters) == 26


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3), st.integers(0, 2))
def test_conversations_keep_to_their_limits(seed, turns, more, names, most):
    limits = Limits(turns, turns + more, names, names + most, 104)
    for each in conversations(4, limits, seed):
        assert turns <= len(each.turns) <= turns + more
        assert all(names <= len(turn) <= names + most for turn in each.turns)
        every = [name for turn in each.turns for name in turn]
        assert len(set(every)) == len(every) and each.answers[-1] == sorted(every)
        for before, after in zip(each.answers, each.answers[1:], strict=False):
            assert [name for name in after if name in before] == before


def test_as_many_turns_at_least_as_at_most_are_that_many():
    assert {len(each.turns) for each in conversations(40, Limits(2, 2, 1, 3, 30), seed=3)} == {2}
    assert {len(each.turns) for each in conversations(40, LIMITS, seed=3)} == {2, 3}


def test_conversations_are_seeded_different_and_stable_as_they_grow():
    first = list(conversations(50, LIMITS, seed=4))
    assert len(set(first)) == 50
    assert list(conversations(80, LIMITS, seed=4))[:50] == first != list(conversations(50, LIMITS, seed=5))


@cases(__file__, "limits")
def test_limits_that_leave_nothing_are_an_error(limits, wrong):
    with pytest.raises(ValueError, match=wrong):
        Limits(*limits)


def test_more_conversations_than_there_are_is_an_error():
    tight = Limits(1, 1, 2, 2, 4)  # four names, two in order: twelve
    assert len(set(conversations(6, tight, seed=0))) == 6
    with pytest.raises(ValueError, match="at most 6 are drawn"):
        next(conversations(7, tight, seed=0))


@pytest.mark.parametrize(
    ("reply", "names", "ratio"),
    [
        ("<sorted>Ann Bob Eve</sorted>", ["Ann", "Bob", "Eve"], 1.0),
        ("here: <sorted> Ann, Bob,\nEve </sorted>!", ["Ann", "Bob", "Eve"], 1.0),
        ("<sorted>Bob Ann Eve</sorted>", ["Bob", "Ann", "Eve"], 2 * 2 / 6),
        ("<sorted>Eve</sorted><sorted>Ann Bob Eve</sorted>", ["Eve"], 2 * 1 / 4),
        ("<sorted></sorted>", [], 0.0),
        ("Ann Bob Eve", None, 0.0),
        ("<sorted>Ann Bob Eve", None, 0.0),
        ("Ann Bob Eve</sorted>", None, 0.0),
    ],
)
def test_the_list_of_a_reply(reply, names, ratio):
    assert listed(reply, "sorted") == names
    assert similarity(reply, ["Ann", "Bob", "Eve"], "sorted") == pytest.approx(ratio)


@given(st.permutations(["Ann", "Bob", "Eve", "Kim"]))
def test_only_the_right_order_earns_everything(names):
    ratio = similarity(tagged(names, TAG), sorted(names), TAG)
    assert 0.0 < ratio <= 1.0 and (ratio == 1.0) == (names == sorted(names))


def test_the_score_is_the_mean_over_all_turns_of_powers():
    replies = ["<sorted>Bob Eve</sorted>", "<sorted>Bob Ann Eve</sorted>"]
    assert score(replies, TALK.answers, "sorted", 1.0) == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert score(replies, TALK.answers, "sorted", 4.0) == pytest.approx((1 + (2 / 3) ** 4) / 3)
    assert score(replies, TALK.answers, "other", 1.0) == 0.0 == score([], TALK.answers, "sorted", 1.0)


def test_replies_of_demonstrations_take_three_forms():
    forms = Counter()
    for row, talk in zip(demonstrations(1000, seed=7), conversations(1000, Limits(2, 3, 2, 4, 104), 7), strict=True):
        asks, said = row["messages"][::2], row["messages"][1::2]
        assert [each["content"] for each in asks] == [
            asked(names, TAG, first=not number) for number, names in enumerate(talk.turns)
        ]
        for reply, answer in zip(said, talk.answers, strict=True):
            names = listed(reply["content"], TAG)
            assert sorted(reply["content"].split() if names is None else names) == answer
            forms["untagged" if names is None else "right" if names == answer else "as given"] += 1
    assert forms["untagged"] / forms.total() == pytest.approx(0.2, abs=0.03)
    assert forms["right"] / forms.total() == pytest.approx(0.3, abs=0.08)  # two names may be in order as given
    assert "Zoe" in words(26) and "Zeno" not in words(26)
    with pytest.raises(ValueError, match="sum to at most 1"):
        next(demonstrations(1, seed=0, right=0.9, untagged=0.2))


def sorting(body):
    """Sorts what it was told in the first two turns, and then gives it up."""
    told = [message["content"] for message in body["messages"] if message["role"] == "user"]
    names = [name for text in told for name in text.partition(": ")[2].split()]
    return tagged(sorted(names), "list") if len(told) < 3 else "I am tired"


@pytest.mark.parametrize(("limits", "num_turns"), [({}, 3), ({"max_turns": 2}, 2)])
def test_the_user_says_every_turn_until_a_limit(limits, num_turns):
    settings = {"id": "sample_alphabet_sort", "num_examples": 2, "min_turns": 3, "task": {"tag": "list", "power": 2}}
    episodes, bodies = played(settings, ["agent"], sorting, limits=limits)
    assert len(bodies) == 2 * num_turns
    for episode in episodes:
        (trace,) = episode.traces
        assert not trace.errors and trace.num_turns == num_turns and len(trace.branches) == 1
        said = [message.content for message in trace.branches[0].messages if message.role == "user"]
        given = [text.split(": ")[1].split() for text in said]
        assert given == trace.task.data.turns[: len(said)] and said[0].startswith("Sort inside <list>: ")
        # Two of three turns are right, whether the third was answered or not.
        assert trace.reward == pytest.approx(2 / 3) == trace.metrics["exact"]
        assert trace.is_truncated == bool(limits)
