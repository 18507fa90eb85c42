"""The sample environment that needs eyes: what is drawn, and that text alone never helps."""

import base64
import io
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_looking.demonstrations import demonstrations
from sample_looking.pictures import CELL, COUNTS, REQUEST, SIDE, is_right, pictures, shuffled

pytestmark = pytest.mark.engine


def pixels(url: str) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as picture:
        return np.asarray(picture.convert("RGB"))


@given(st.integers(0, 2**32))
def test_a_picture_has_as_many_squares_as_it_says(seed: int) -> None:
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


def test_who_does_not_look_is_right_one_time_in_four() -> None:
    assert Counter(picture.count for picture in pictures(400, 3)) == dict.fromkeys(COUNTS, 100)


def test_shuffled_numbers_are_the_same_numbers_of_other_pictures() -> None:
    found = list(pictures(400, 3))
    mixed = shuffled(found, 3)
    assert Counter(each.count for each in mixed) == Counter(each.count for each in found)
    assert [each.url for each in mixed] == [each.url for each in found] and mixed == shuffled(found, 3)
    right = sum(one.count == other.count for one, other in zip(found, mixed, strict=True))
    assert 60 < right < 140


def test_rewards_by_hand() -> None:
    assert is_right("3", 3) and is_right(" 3\n", 3)
    assert not any(is_right(reply, 3) for reply in ("", "4", "33", "3 squares", "three"))


def test_demonstrations_show_a_picture_and_are_right_as_often_as_asked() -> None:
    rows, seen = list(demonstrations(400, seed=1, right=0.5)), list(pictures(400, 1_000_004))
    for row, picture in zip(rows, seen, strict=True):
        shown, asked = row["prompt"][0]["content"]
        assert shown["image_url"]["url"] == picture.url and asked["text"] == REQUEST
    right = sum(is_right(row["completion"], picture.count) for row, picture in zip(rows, seen, strict=True))
    assert 0.5 < right / 400 < 0.75
    with pytest.raises(ValueError, match="a share from 0 to 1"):
        list(demonstrations(1, seed=1, right=2))


def test_tasks_name_their_picture_once() -> None:
    from sample_looking.taskset import LookingConfig, LookingTaskset

    tasks = list(LookingTaskset(LookingConfig(num_examples=8)).load())
    assert len({task.key for task in tasks}) == 8 and [task.data.count for task in tasks] == [*COUNTS] * 2
    assert tasks[0].data.prompt[0].content[1].text == REQUEST
