"""Presents a directory of weights as the engine needs it: weights only, and an untied output head.

This works around two faults. The engine loads every safetensors file of a directory, so optimizer state beside the
weights would be read as weights. And the CPU build keeps a packed copy of the output head and does not refresh it from
a tied embedding: after a reload it serves the old head without an error. Served with `tie_word_embeddings` switched off
and the embedding a second time as `lm_head.weight`, the head is reloaded like any other weight, exactly.

An engine of ours takes a policy's tensors from `read_weights`. One of others, and any that starts, reads a directory
that `serving_view` makes.
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
    if not any(directory.glob("*.safetensors")):
        raise model_info.ModelUnusable(
            f"no model in {str(directory)!r}: it holds a config.json and no *.safetensors file. Give a directory in "
            "Hugging Face form, with the weights"
        )
    try:
        for file in weight_files(directory):
            read_header(file)
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


def require_loadable(directory: Path, *, untie: bool) -> tuple[Path, dict[str, Any], int] | None:
    """Return the embedding that stands for an output head with `untie`, None where there is another or it stays tied.

    It is given as a file, the tensor's entry in its header and the offset of the file's bytes. Raises WeightsUnusable
    where a file is damaged, or none holds the embedding.
    """
    embedding = None
    for path in weight_files(directory):
        tensors, start = read_header(path)
        for name in EMBEDDINGS:
            if name in tensors:
                embedding = path, tensors[name], start
    if not (untie and has_tied_head(directory)):
        return None
    if embedding is None:
        raise WeightsUnusable(f"{str(directory)!r} ties its head to an embedding that none of its files holds")
    return embedding


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
def serving_view(directory: str | Path, *, untie: bool, below: Path | None = None) -> Iterator[Path]:
    """Yield the directory to load weights from, checked for completeness: the given one or a temporary view of it.

    The view is a directory of links in `below`, or among the system's temporary files.
    """
    directory = Path(directory)
    files, head = weight_files(directory), require_loadable(directory, untie=untie)
    if not head and len(files) == len(list(directory.glob("*.safetensors"))):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="stagecoach-weights-", dir=below) as temporary:
        view = Path(temporary)
        for path in directory.iterdir():
            if path.is_file() and (path.suffix != ".safetensors" or path in files):
                (view / path.name).symlink_to(path.resolve())
        if head:
            _write_head(view / "tied_head.safetensors", *head)
            # The index does not list the head, and files that it does not list are not loaded.
            (view / "model.safetensors.index.json").unlink(missing_ok=True)
        yield view


def _write_head(target: Path, source: Path, entry: dict[str, Any], start: int) -> None:
    """Copy the embedding's bytes into a safetensors file of their own, under the head's name."""
    begin, end = entry["data_offsets"]
    described = {HEAD: {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [0, end - begin]}}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # the format wants the tensors at a multiple of 8 bytes
    with source.open("rb") as reading, target.open("wb") as writing:
        writing.write(struct.pack("<Q", len(text)) + text)
        reading.seek(start + begin)
        remaining = end - begin
        while remaining:
            chunk = reading.read(min(remaining, 1 << 24))  # an embedding may be larger than the memory to spare
            writing.write(chunk)
            remaining -= len(chunk)
