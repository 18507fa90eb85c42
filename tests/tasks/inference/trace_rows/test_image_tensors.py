"""What a model is given of an image, and which images no model is asked about."""

import base64
import io
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from configs.sections import ModelConfig
from storage.schemas.stage_tables import IMAGE_TENSORS, IMAGES
from tasks.inference.trace_rows.image_tensors import open_picture, picture_problem, tensors_of
from tasks.inference.trace_rows.images import parse_image
from tests.fixtures.driving import ROOT
from tests.fixtures.pictures import picture_url


def image_rows(*urls, message=0):
    rows = []
    for url in urls:
        image = parse_image(url)
        assert image is not None
        row = {"group_id": "g0", "digest": image.digest, "trace_id": "t0", "message": message}
        rows.append({**row, **image._asdict()})
    return pa.Table.from_pylist(rows, schema=IMAGES.arrow)


def huge():
    """A PNG of 20 megapixels in few bytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("1", (5000, 4000)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com/a.png", "Nothing is loaded from elsewhere"),
        ("file:///etc/passwd", "Nothing is loaded from elsewhere"),
        ("data:image/svg+xml;utf8,<svg/>", "is no image in base64"),
        ("data:image/png;base64,AAAA", "cannot be opened"),
        (picture_url(64, 64)[:-900] + "AAAA", "cannot be opened|is no image in base64"),
        (huge(), r"5000 x 4000 pixels, and 16,000,000 are allowed"),
    ],
)
def test_no_model_is_asked_about_a_picture_that_is_elsewhere_broken_or_huge(url, said):
    import re

    assert re.search(said, picture_problem(url))


def test_what_is_transparent_is_white():
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.array([[[9, 9, 9, 0], [9, 9, 9, 255]]], np.uint8)).save(file, "PNG")
    assert np.asarray(open_picture(file.getvalue())).tolist() == [[[255, 255, 255], [9, 9, 9]]]


@pytest.mark.engine
def test_tensors_are_those_of_the_models_processor(seeing_model):
    from transformers import AutoProcessor

    url = picture_url(48, 32)
    broken = image_rows(url).to_pylist()[0] | {"digest": "broken", "data": b"\x89PNG"}
    rows = pa.concat_tables([image_rows(url), pa.Table.from_pylist([broken], schema=IMAGES.arrow)])
    made = tensors_of(rows, ModelConfig(path=str(seeing_model)))["image_tensors"]
    assert made.schema.equals(IMAGE_TENSORS.arrow)
    found = {row["name"]: np.frombuffer(row["data"], row["dtype"]).reshape(row["shape"]) for row in made.to_pylist()}
    image = open_picture(rows["data"][0].as_py())
    expected = AutoProcessor.from_pretrained(seeing_model).image_processor(images=[image], return_tensors="np")
    assert found.keys() == {"pixel_values", "image_grid_thw"} and found["pixel_values"].shape == (24, 384)
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    assert made["num_tokens"].to_pylist() == [6, 6] and "broken" not in made["digest"].to_pylist()
    assert tensors_of(image_rows(url, message=None), ModelConfig(path=str(seeing_model))) == {}, "no message shows it"


THREADS = """
import sys, threading
from tasks.inference.trace_rows.image_tensors import load_processor
start, found = threading.Barrier(6), []
def load():
    start.wait()
    found.append(load_processor(sys.argv[1]))
threads = [threading.Thread(target=load) for _ in range(6)]
for each in threads: each.start()
for each in threads: each.join()
assert len(found) == 6 and len({id(each) for each in found}) == 1, found
"""


@pytest.mark.nightly
@pytest.mark.engine
def test_groups_that_end_together_load_one_processor(seeing_model):
    """In a process of its own, which has not imported transformers: that replaces its own module meanwhile."""
    done = subprocess.run([sys.executable, "-c", THREADS, str(seeing_model)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
