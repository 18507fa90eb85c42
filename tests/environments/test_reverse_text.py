"""The sample environment: generated texts, a reward that can be told by hand, and noisy demonstrations."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_reverse_text.demonstrations import demonstrations
from sample_reverse_text.texts import ANSWER, prompt, similarity, tagged, texts

from tests.fixtures.commands import cases

pytestmark = pytest.mark.engine

LETTERS = st.text(alphabet="abcdef", min_size=1, max_size=8)


@cases(__file__, "reversed")
def test_the_reward_of_a_completion(completion, reward):
    assert similarity(completion, "cba") == pytest.approx(reward)


@given(LETTERS, LETTERS)
def test_only_the_right_answer_earns_everything(answer, expected):
    reward = similarity(tagged(answer), expected)
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == (answer == expected)


def test_texts_are_seeded_different_and_stable_as_they_grow():
    first = list(texts(50, 3, 6, "abcdef", seed=4))
    assert len(set(first)) == 50
    assert all(3 <= len(text) <= 6 and set(text) <= set("abcdef") for text in first)
    assert list(texts(80, 3, 6, "abcdef", seed=4))[:50] == first
    assert list(texts(50, 3, 6, "abcdef", seed=5)) != first


def test_more_texts_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="there are 6"):
        list(texts(4, 1, 2, "ab", seed=0))
    with pytest.raises(ValueError, match="want 1 <= min_length"):
        list(texts(1, 3, 2, "ab", seed=0))


def test_a_fifth_of_the_demonstrations_is_right():
    kinds = Counter()
    for row in demonstrations(4000, seed=7):
        text = row["prompt"].removeprefix(prompt(""))
        if not ANSWER.search(row["completion"]):
            kinds["untagged"] += 1
        elif row["completion"] == tagged(text[::-1]) and text != text[::-1]:
            kinds["right"] += 1
        else:
            kinds["not reversed"] += 1
    assert kinds["right"] / 4000 == pytest.approx(0.2, abs=0.025)
    assert kinds["untagged"] / 4000 == pytest.approx(0.4, abs=0.03)


def test_bad_shares_are_an_error():
    with pytest.raises(ValueError, match="sum to at most 1"):
        list(demonstrations(1, seed=0, right=0.7, untagged=0.4))


def test_a_task_says_the_right_answer_where_pages_look_for_it():
    from sample_reverse_text import ReverseTextTaskset
    from sample_reverse_text.taskset import ReverseTextConfig

    from flows.queries.reader import EXPECTED

    (task,) = ReverseTextTaskset(ReverseTextConfig(id="sample_reverse_text", num_examples=1))
    assert [getattr(task.data, name) for name in EXPECTED if hasattr(task.data, name)] == [task.data.text[::-1]]
    assert type(task.data)(prompt="p", text="ab").answer == "", "tasks that were recorded without it can be read"
