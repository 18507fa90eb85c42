"""Images of packed rows: where their tokens are, once each for a batch, and nothing where there is none."""

import pytest

from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import BATCH_IMAGES
from tasks.arrays.images import ImageBreach, attach_images, attached_tensors
from tasks.packing.stage import STAGE, packing
from tests.fixtures.builders import view
from tests.fixtures.pictures import PAD, conversation, packed_tables, sees
from tests.fixtures.stages import inputs


def test_the_images_of_rows_by_hand():
    made = packed_tables(tokens_per_row=10)
    check_rows(made["batch_images"], BATCH_IMAGES, RowPlace("batch_images"))
    rows = {row["row"]: row for row in made["batches"].to_pylist()}
    images = made["batch_images"].to_pylist()
    for image in images:
        row, end = rows[image["row"]], image["offset"] + image["num_tokens"]
        assert row["token_ids"][image["offset"] : end] == [PAD] * image["num_tokens"]
    placed = sum(image["num_tokens"] for image in images)
    assert placed == sum(token == PAD for row in rows.values() for token in row["token_ids"]) == 7
    assert sorted(image["digest"] for image in images) == ["x", "x", "x", "y"]
    stored = [image for image in images if image["names"]]
    assert sorted(image["digest"] for image in stored) == ["x", "y"], "an image's tensors are stored once for a batch"
    assert stored[0]["names"] == ["pixel_values", "image_grid_thw"] and stored[0]["dtypes"] == ["float32", "int64"]


def test_a_learner_is_sent_one_table():
    made = packed_tables()
    sent = attach_images(made["batches"], made["batch_images"])
    assert sent.select(made["batches"].column_names).equals(made["batches"])
    per_row = [[(image["digest"], image["offset"]) for image in row] for row in sent["images"].to_pylist()]
    expected = [[] for _ in per_row]
    for image in made["batch_images"].to_pylist():
        expected[image["row"]].append((image["digest"], image["offset"]))
    assert per_row == expected
    found = attached_tensors(sent)
    assert {name: [each.shape for each in parts] for name, parts in found.items()} == {
        "x": [(8, 6), (1, 3)],
        "y": [(4, 6), (1, 3)],
    }
    assert attach_images(made["batches"], None) is made["batches"]


def test_a_model_that_sees_without_a_picture_packs_as_ever():
    tables = inputs([sees("a"), sees("b", reward=0.0)], [*conversation("a", [], [1, 2]), *conversation("b", [], [3])])
    assert set(packing(tables, view(STAGE, packing={"tokens_per_row": 8}))) == {"batches"}


def test_tokens_without_their_embeddings_stop_before_the_learner():
    with pytest.raises(ImageBreach, match=r"message 0 of trace c: 3 tokens stand for its images, which want 4 at 1"):
        packed_tables({"x": (1, 4, 4), "y": (1, 2, 2)})
