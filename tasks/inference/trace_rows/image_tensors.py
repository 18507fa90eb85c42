"""Makes of images what the model is given of them: the tensors of its own processor, the engine's among them.

An engine scales and cuts images itself, and answers with tokens alone. The learner needs the very same values, so they
are made here by the same processor, and stored once for a group and image.
"""

import io
import logging
import math
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from storage.schemas.stage_tables import IMAGE_TENSORS
from tasks.inference.engine import model_info
from tasks.inference.trace_rows.images import parse_image
from tasks.runtime.torchvision_operators import declare_torchvision_operators

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

    from configs.sections import ModelConfig

MOST_PIXELS = 16_000_000
MOST_BYTES = 16 * 2**20
"""Of an image that a model is asked about: more is a mistake, or an attack on whoever opens it."""
GRID = "image_grid_thw"
"""The tensor that says how many patches an image has in time, height and width."""
_LOADING = threading.Lock()
_log = logging.getLogger(__name__)


def tensors_of(images: pa.Table, model: "ModelConfig") -> dict[str, pa.Table]:
    """Return `image_tensors` of the images that messages brought in; nothing where the model is unknown here or blind.

    An image that cannot be opened has no tensors: no tokens stand for it either, and training says where some do.
    """
    directory = processor_directory(model)
    shown = [row for row in images.to_pylist() if row["message"] is not None]
    if directory is None or not shown:
        return {}
    processor = load_processor(str(directory))
    rows = [made for row in shown for made in _tensor_rows(row, processor)]
    return {"image_tensors": pa.Table.from_pylist(rows, schema=IMAGE_TENSORS.arrow)} if rows else {}


def processor_directory(model: "ModelConfig") -> Path | None:
    """Return the directory of the model's image processor; None where there is none."""
    name = model.tokenizer or model.path
    directory = model_info.model_directory(name) if name else None
    names = ("processor_config.json", "preprocessor_config.json")
    return directory if directory and any((directory / each).is_file() for each in names) else None


@lru_cache(2)
def load_processor(directory: str) -> Any:
    """Return the image processor of a model directory: the class that the engine takes, too."""
    # Groups end in several threads. transformers replaces its own module while it is imported, so that a second thread
    # which waits for that import goes on with a module that has no processors.
    with _LOADING:
        declare_torchvision_operators()
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return getattr(processor, "image_processor", None)


def _tensor_rows(row: dict[str, Any], processor: Any) -> Iterator[dict[str, Any]]:
    try:
        made = processor(images=[open_picture(row["data"])], return_tensors="np")
    except Exception as error:  # Pillow and processors raise all kinds for a broken image
        _log.warning("image %s of group %s has no tensors: %s", row["digest"][:12], row["group_id"], error)
        return
    if GRID not in made:
        raise model_info.ModelUnusable(
            f"{type(processor).__name__} makes {sorted(made)} of an image, and not {GRID}: models of this family are "
            "sampled and not trained. Choose one of the Qwen-VL families"
        )
    num_tokens = math.prod(np.asarray(made[GRID])[0].tolist()) // processor.merge_size**2
    for name, value in made.items():
        array = np.ascontiguousarray(value)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        yield {
            "group_id": row["group_id"],
            "digest": row["digest"],
            "name": name,
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "data": array.tobytes(),
            "num_tokens": num_tokens,
        }


def open_picture(data: bytes) -> "Picture":
    """Return an image as the engine opens it: in RGB, what is transparent on white. Raises what Pillow raises."""
    from PIL import Image

    picture: Picture = Image.open(io.BytesIO(data))
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = Image.new("RGB", picture.size, (255, 255, 255))
        white.paste(picture, mask=picture.split()[3])
        return white
    return picture.convert("RGB")


@lru_cache(256)
def picture_problem(url: str) -> str:
    """Return why a model is not asked about the image at a URL; empty where it is whole, and inside the message itself.

    Nothing is loaded from elsewhere, and no file is opened: neither here nor by the engine.
    """
    from PIL import Image

    if not url.startswith("data:"):
        return f"a picture is at {url[:80]!r}. Nothing is loaded from elsewhere: put it into the message as a data URL"
    image = parse_image(url)
    if image is None:
        return f"a picture begins with {url[:40]!r} and is no image in base64, as PNG, JPEG or WebP have it"
    if len(image.data) > MOST_BYTES:
        return f"a picture has {len(image.data):,} bytes, and {MOST_BYTES:,} are allowed: make it smaller"
    try:
        with Image.open(io.BytesIO(image.data)) as picture:  # reads the header, not the picture
            width, height = picture.size
            if width * height > MOST_PIXELS:
                return f"a picture has {width} x {height} pixels, and {MOST_PIXELS:,} are allowed: make it smaller"
            picture.load()
    except Exception as error:  # Pillow raises all kinds for broken files
        return f"a picture cannot be opened, its file is broken or of an unknown kind: {error}"
    return ""
