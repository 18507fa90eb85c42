"""Images of packed rows: where their tokens are, once each for a batch, and nothing where there is none."""

import pytest

from storage.schemas.contract import RowPlace, check_rows
from storage.schemas.stage_tables import BATCH_IMAGES
from tasks.arrays.images import ImageBreach
from tasks.packing.stage import STAGE
from tests.fixtures.builders import exchange, message, trace, view
from tests.fixtures.pictures import PAD, conversation, packed_tables, sees, shows, tensors
from tests.fixtures.stages import inputs, packing, written


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


@pytest.mark.parametrize(
    ("most", "together"),
    [(0, [[0], [1], [2], [3]]), (8, [[0], [1], [2], [3]]), (9, [[0, 1], [2, 3]]), (99, [[0, 1, 2, 3]])],
)
def test_images_of_several_samples_of_a_row_are_where_their_tokens_are(monkeypatch, most, together):
    """Also those of a later message. A row has nine tokens of images; a part ends with the row that passes `most`."""
    monkeypatch.setattr("tasks.packing.stage.MOST_IMAGE_TOKENS", most)
    monkeypatch.setattr("tasks.runtime.stored_rows.PART_BYTES", 0)  # small parts are not joined
    traces, messages = [], []
    for place, name in enumerate("abcdefghijkl"):
        traces.append(sees(name, reward=float(place % 2)))
        messages += [
            *conversation(name, ["x"], [1, PAD, PAD]),
            shows(name, 2, ["y"], [2, PAD, 3], parent=1),
            message(name, 3, parent=2, tokens=[7], sampled=True),
        ]
    tables = inputs(traces, messages) | {"image_tensors": tensors({"x": (1, 4, 2), "y": (1, 2, 2)})}
    made = packing(tables, view(STAGE, packing={"tokens_per_row": 27}))
    parts = list(made.pop("batch_images"))
    rows = written(made)["batches"].to_pylist()
    assert [len(row["sample_ids"]) for row in rows] == [3] * 4
    assert [part["row"].to_pylist() for part in parts] == [[row for row in part for _ in range(6)] for part in together]
    for row in rows:
        own = [image for part in parts for image in part.to_pylist() if image["row"] == row["row"]]
        places = [place for each in own for place in range(each["offset"], each["offset"] + each["num_tokens"])]
        assert places == [place for place, token in enumerate(row["token_ids"]) if token == PAD]
        assert [(each["place"], each["digest"]) for each in own] == list(enumerate("xyxyxy"))


def test_a_model_that_sees_without_a_picture_packs_as_ever():
    tables = inputs([sees("a"), sees("b", reward=0.0)], [*conversation("a", [], [1, 2]), *conversation("b", [], [3])])
    assert set(written(packing(tables, view(STAGE, packing={"tokens_per_row": 8})))) == {"batches"}


def test_tokens_without_their_embeddings_stop_before_the_learner():
    with pytest.raises(ImageBreach, match=r"message 0 of trace c: 3 tokens stand for its images, which want 4 at 1"):
        packed_tables({"x": (1, 4, 4), "y": (1, 2, 2)})


def test_images_whose_tokens_nobody_knows_stop_before_the_learner():
    """As of rollouts that were imported without the renderer's map: their tokens would be trained on as text."""
    tables = inputs([trace("a"), trace("b", reward=0.0)], [*conversation("a", ["x"], [1, PAD]), *exchange("b")])
    with pytest.raises(ImageBreach, match="message 0 of trace a: its image x has no tensors in table image_tensors"):
        written(packing(tables, view(STAGE, packing={"tokens_per_row": 8})))
