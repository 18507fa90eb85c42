"""The sample environment that needs eyes: what is drawn, and that text alone never helps."""

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sample_looking.pictures import (
    CELL,
    COUNTS,
    REQUEST,
    SIDE,
    is_right,
    pictures,
)
from sample_looking.taskset import LookingConfig, LookingTaskset
from sample_looking.words import SCHEMA

from tests.environments.scripted import calling, played

pytestmark = pytest.mark.engine


def loaded(**settings):
    return list(LookingTaskset(LookingConfig(**settings)).load())


def pixels(url):
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as picture:
        return np.asarray(picture.convert("RGB"))


@given(st.integers(0, 2**32))
def test_a_picture_has_as_many_squares_as_it_says(seed):
    for picture in pictures(4, seed):
        shown = pixels(picture.url)
        assert shown.shape == (SIDE * CELL, SIDE * CELL, 3)
        bright = shown.min(2) >= 130
        cells = bright.reshape(SIDE, CELL, SIDE, CELL).any((1, 3))
        assert cells.sum() == picture.count
        for top, left in np.argwhere(cells):
            rows, columns = np.nonzero(bright[top * CELL : (top + 1) * CELL, left * CELL : (left + 1) * CELL])
            side = rows.max() - rows.min() + 1
            assert side == columns.max() - columns.min() + 1 and len(rows) == side**2, "a square, and whole"


def test_rewards_by_hand():
    assert is_right("3", 3) and is_right(" 3\n", 3)
    assert not any(is_right(reply, 3) for reply in ("", "4", "33", "3 squares", "three"))


def test_tasks_name_their_pictures_once():
    tasks = loaded(num_examples=8)
    assert len({task.key for task in tasks}) == 8
    assert [task.data.counts for task in tasks] == [[count] for count in (*COUNTS, *COUNTS)]
    assert tasks[0].data.prompt[0].content[1].text == REQUEST and tasks[0].data.later == []
    turns = loaded(num_examples=2, num_pictures=3)
    assert [task.data.counts for task in turns] == [[1, 2, 3], [4, 1, 2]] and turns[0].key != turns[1].key
    asked = [message for task in turns for message in (*task.data.prompt, *task.data.later)]
    assert [message.content[0].image_url.url for message in asked] == [each.url for each in pictures(6, 0)]


def test_the_model_looks_with_a_tool_and_each_turn_of_the_user_counts():
    """The tool server is real, and a function stands in for the model."""

    def looking(body):
        assert [each["function"]["name"] for each in body["tools"]] == ["look"]
        last = body["messages"][-1]
        if last["role"] == "user":
            return calling("look", name=last["content"].removeprefix(f"{REQUEST} "))
        (shown,) = last["content"]
        seen.append(shown["image_url"]["url"])
        return str(answers[len(seen) - 1])

    seen = []
    answers = [1, 3]  # of the first two pictures, which have 1 and 2
    settings = {"id": "sample_looking", "num_examples": 1, "num_pictures": 2, "tool": True}
    (episode,), bodies = played(settings, ["agent"], looking)
    (trace,) = episode.traces
    assert seen == [each.url for each in pictures(2, 0)] and trace.reward == 0.5
    assert bodies[0]["tools"] == [SCHEMA], "as demonstrations have it"
    roles = [message["role"] for message in bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
