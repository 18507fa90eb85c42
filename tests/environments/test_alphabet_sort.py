"""Names to keep sorted: conversations and scores by hand, demonstrations, and rollouts of several turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_alphabet_sort.lists import (
    Conversation,
    Limits,
    asked,
    conversations,
    listed,
    score,
    similarity,
    tagged,
)
from sample_alphabet_sort.taskset import AlphabetSortConfig, AlphabetSortData, AlphabetSortTask

from configs.load import load
from tests.environments.scripted import played

pytestmark = pytest.mark.engine

TALK = Conversation((("Eve", "Bob"), ("Ann",), ("Kim", "Abe")))


def test_a_conversation_by_hand():
    assert TALK.answers == [["Bob", "Eve"], ["Ann", "Bob", "Eve"], ["Abe", "Ann", "Bob", "Eve", "Kim"]]
    assert asked(TALK.turns[0], "sorted", first=True) == "Sort inside <sorted>: Eve Bob"
    assert asked(TALK.turns[1], "x", first=False) == "Add inside <x>: Ann"


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


def test_the_score_is_the_mean_over_all_turns_of_powers():
    replies = ["<sorted>Bob Eve</sorted>", "<sorted>Bob Ann Eve</sorted>"]
    assert score(replies, TALK.answers, "sorted", 1.0) == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert score(replies, TALK.answers, "sorted", 4.0) == pytest.approx((1 + (2 / 3) ** 4) / 3)
    assert score(replies, TALK.answers, "other", 1.0) == 0.0 == score([], TALK.answers, "sorted", 1.0)


@pytest.mark.parametrize("preset", ["qwen3_gpu", "qwen3_4b_gpu", "qwen3_8b_node"])
def test_presets_for_gpus_have_long_answers_that_fit(preset):
    config = load([preset])
    settings = AlphabetSortConfig.model_validate(config.environments[0].taskset)
    talks = [*conversations(settings.num_examples, settings.limits, settings.seed)][::500]
    for (names,), (answer,) in ((talk.turns, talk.answers) for talk in talks):
        assert 270 <= len(answer) == len(set(names)) <= 330
        longest = 4.5 * len(answer)  # tokens, if a double name has no more
        assert longest < config.rollout.max_tokens and 2 * longest < config.engine.max_model_len
        data = AlphabetSortData(prompt=asked(names, "sorted", first=True), turns=[list(names)])
        assert len(AlphabetSortTask(data, settings.task).key) < 80


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
