"""Presents a directory of weights as the engine needs it: weights only, and an untied output head.

This works around two faults. The engine loads every safetensors file of a directory, so optimizer state beside the
weights would be read as weights: an engine that starts, and an external one, read a view without it. And the CPU build
keeps a packed copy of the output head and does not refresh it from a tied embedding: after a reload it serves the old
head without an error. Stagecoach's engines run with `tie_word_embeddings` switched off there, and take a policy's
tensors from `read_weights`, with the embedding a second time as `lm_head.weight`.
"""

import json
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.inference.engine import model_info

HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
OPTIMIZER_PREFIX = "optimizer"
INDEX = "model.safetensors.index.json"


class WeightsUnusable(ValueError):
    """The directory does not hold a complete set of weights."""


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a directory that hold weights; raises WeightsUnusable where there are none."""
    files = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(OPTIMIZER_PREFIX))
    if not files:
        raise WeightsUnusable(f"no weights in {str(directory)!r}: expected model.safetensors. Nothing was loaded")
    return files


def require_weights(directory: Path) -> None:
    """Raise ModelUnusable where a model's directory lacks weights, or a file of them is missing or cut short.

    Reads headers alone. safetensors is the one format of learner and engine.
    """
    try:
        require_readable(directory)
        index = json.loads((directory / INDEX).read_text(encoding="utf-8")) if (directory / INDEX).is_file() else {}
    except ValueError as error:
        raise model_info.ModelUnusable(f"model.path: {error}. Copy or download the model again") from error
    absent = sorted({name for name in index.get("weight_map", {}).values() if not (directory / name).is_file()})
    if absent:
        raise model_info.ModelUnusable(
            f"model.path: {str(directory)!r} lacks {len(absent)} file(s) that its {INDEX} names, first {absent[0]}. "
            "Copy or download the model again"
        )


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's tensors by name, and the offset of their bytes; WeightsUnusable for a cut file.

    Layout: 8 bytes little-endian length, that many bytes of JSON, then the tensors' bytes
    (https://github.com/huggingface/safetensors#format).
    """
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        content = file.read(length)
    try:
        tensors = json.loads(content)
    except ValueError as error:
        raise WeightsUnusable(f"{path} is not a safetensors file: its header cannot be read") from error
    tensors.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if path.stat().st_size != end:
        raise WeightsUnusable(f"{path} has {path.stat().st_size} bytes and its header says {end}: it is damaged")
    return tensors, 8 + length


def has_tied_head(directory: Path) -> bool:
    """Tell whether the output head is the embedding: as the config says, unless a separate head is stored."""
    if not model_info.read(directory).tied:
        return False
    return not any(HEAD in read_header(path)[0] for path in weight_files(directory))


def require_readable(directory: Path) -> None:
    """Raise WeightsUnusable where a directory has no weights, or a file of them is damaged."""
    for path in weight_files(directory):
        read_header(path)


def read_weights(directory: Path, *, untie: bool) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a directory by name, each once; with `untie` a tied embedding is the output head as well."""
    from safetensors import safe_open

    needs_head = untie and has_tied_head(directory)
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(name)
                yield name, tensor
                if needs_head and name in EMBEDDINGS:
                    yield HEAD, tensor


@contextmanager
def serving_view(directory: str | Path, below: Path | None = None) -> Iterator[Path]:
    """Yield the directory to load weights from: the given one, or a view of it without optimizer state.

    The view is a directory of links in `below`, or among the system's temporary files. Raises WeightsUnusable for
    damaged files.
    """
    directory = Path(directory)
    require_readable(directory)
    files = weight_files(directory)
    if len(files) == len(list(directory.glob("*.safetensors"))):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="stagecoach-weights-", dir=below) as temporary:
        for path in directory.iterdir():
            if path.is_file() and (path.suffix != ".safetensors" or path in files):
                Path(temporary, path.name).symlink_to(path.resolve())
        yield Path(temporary)
