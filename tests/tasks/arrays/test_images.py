"""Images among tokens: each belongs to the part that brought it in, and tokens that stand for none are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.arrays.images import (
    ImageBreach,
    PlacedImage,
    SampleImages,
    StoredTensors,
    Tensor,
    can_see,
    digests_of,
    token_types,
)
from tasks.runtime.stored_rows import rows_of
from tests.fixtures.builders import message, table, trace
from tests.fixtures.pictures import PAD, RECORD, VIDEO, sees, shows, tensors


def images_of(messages, grids, traces=None):
    num_tokens = StoredTensors(rows_of(tensors(grids))).num_tokens
    return SampleImages(table("messages", messages), table("traces", traces or [sees()]), num_tokens)


def test_an_image_belongs_to_the_part_that_brought_it_in():
    messages = [
        shows("t0", 0, ["b", "a"], [1, PAD, 2, PAD, PAD]),
        message("t0", 1, parent=0, tokens=[3, PAD], sampled=True),
        shows("t0", 2, ["b"], [4, PAD, 5], parent=1),
    ]
    found = images_of(messages, {"a": (1, 2, 4), "b": (1, 2, 2)})
    one, two, again = found.along([0, 1, 2])
    assert one == PlacedImage(("g0", "b"), 1, 1) and two == PlacedImage(("g0", "a"), 3, 2)
    assert again == PlacedImage(("g0", "b"), 8, 1), "the token at 6 was sampled by the policy: it stands for no image"
    assert list(found.along([0])) == [one, two], "a branch that ends earlier has what it comes through"


@pytest.mark.parametrize(
    ("digests", "tokens", "said"),
    [
        (["a"], [1, PAD], "1 tokens stand for its images, which want 2"),
        (["a"], [1, PAD, 2, PAD], "2 tokens stand for its images, which want 2 at 0"),
        (["a"], [PAD, PAD, PAD], "3 tokens stand for images, and those that it brought in have 2"),
        ([], [1, PAD], "1 tokens stand for images, and those that it brought in have 0"),
        (["a"], [1, 2], "0 tokens stand"),
        (["z"], [PAD], "has no tensors"),
        ([], [VIDEO], "video"),
    ],
)
def test_tokens_that_do_not_fit_their_images_are_refused(digests, tokens, said):
    found = images_of([shows("t0", 0, digests, tokens)], {"a": (1, 2, 4)})
    with pytest.raises(ImageBreach, match=said):
        list(found.along([0]))


@given(st.lists(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3)), max_size=3), max_size=4))
def test_every_token_that_stands_for_an_image_is_one_of_exactly_one(turns):
    """Turns of images with their sizes in tokens and the length of the text after each, on one path."""
    messages, grids, path = [], {"none": (1, 2, 2)}, []
    for number, turn in enumerate(turns):
        tokens, digests = [7], []
        for height, width, after in turn:
            digests.append(f"d{height}{width}")
            grids[digests[-1]] = (1, 2 * height, 2 * width)
            tokens += [8] + [PAD] * (height * width) + [9] * after
        messages.append(shows("t0", number, digests, tokens, parent=number - 1 if number else None))
        path += tokens
    found = list(images_of(messages, grids).along(range(len(turns)))) if turns else []
    covered = [place for image in found for place in range(image.offset, image.offset + image.num_tokens)]
    assert covered == [place for place, token in enumerate(path) if token == PAD]
    assert [image.key[1] for image in found] == [f"d{height}{width}" for turn in turns for height, width, _ in turn]


def test_types_of_tokens_are_the_renderers():
    assert token_types(RECORD) == {PAD: 1, VIDEO: 2} and token_types("{}") == {}
    assert can_see(table("traces", [trace("a"), sees("b")]))
    assert not can_see(table("traces", [trace("a", record='{"mm_token_type_id_map":{}}')]))


def test_text_that_speaks_of_an_image_is_none():
    assert digests_of('{"content":"stagecoach-image:sha256:ab"}') == []
    assert digests_of('{"content":[{"type":"text","text":"stagecoach-image:sha256:ab"}]}') == []
    assert digests_of('{"content":[{"type":"image_url","image_url":{"url":"stagecoach-image:sha256:ab"}}]}') == ["ab"]


def test_a_tensor_is_read_as_it_was_written():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (Tensor("x", array.dtype.name, array.shape, array.tobytes()).array() == array).all()
