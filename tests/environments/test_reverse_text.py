"""The sample environment: generated texts, a reward that can be told by hand, and noisy demonstrations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_reverse_text.texts import similarity, tagged

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


def test_a_task_says_the_right_answer_where_pages_look_for_it():
    from sample_reverse_text import ReverseTextTaskset
    from sample_reverse_text.taskset import ReverseTextConfig

    from flows.queries.reader import EXPECTED

    (task,) = ReverseTextTaskset(ReverseTextConfig(id="sample_reverse_text", num_examples=1))
    assert [getattr(task.data, name) for name in EXPECTED if hasattr(task.data, name)] == [task.data.text[::-1]]
    assert type(task.data)(prompt="p", text="ab").answer == "", "tasks that were recorded without it can be read"
