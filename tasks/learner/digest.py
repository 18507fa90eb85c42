"""The digest of a policy's weights, computed from its files without torch."""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

OPTIMIZER_FILE = "optimizer.safetensors"
BLOCK = 1 << 22


@dataclass(frozen=True)
class _Stored:
    file: Path
    dtype: str
    shape: list[int]
    start: int
    size: int


def weights_sha256(directory: str | Path) -> str:
    """Return the SHA-256 over all tensors in a directory's weight files, in order of name.

    For each tensor: its name, safetensors dtype and shape as one JSON line, then its bytes. How the tensors are spread
    over files does not matter; optimizer state is left out. Raises ValueError when there is no weight file, when one
    is damaged, or when a name occurs twice.
    """
    tensors: dict[str, _Stored] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        if file.name == OPTIMIZER_FILE:
            continue
        for name, stored in _header(file).items():
            if name in tensors:
                raise ValueError(f"{directory}: tensor {name!r} is in {tensors[name].file.name} and {file.name}")
            tensors[name] = stored
    if not tensors:
        raise ValueError(f"{directory}: no weights in *.safetensors")
    digest = hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        digest.update(_line(name, stored.dtype, stored.shape))
        for block in _blocks(stored):
            digest.update(block)
    return digest.hexdigest()


def tensors_sha256(tensors: Mapping[str, npt.NDArray[np.float32]]) -> str:
    """Return the digest that float32 arrays, by name, would have once saved."""
    digest = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        digest.update(_line(name, "F32", list(array.shape)))
        digest.update(np.ascontiguousarray(array, dtype="<f4").data)
    return digest.hexdigest()


def over_base(base_sha256: str, adapter_sha256: str) -> str:
    """Return the digest of a policy that is an adapter over the weights of another."""
    return hashlib.sha256(json.dumps([base_sha256, adapter_sha256]).encode()).hexdigest()


def _line(name: str, dtype: str, shape: list[int]) -> bytes:
    return json.dumps([name, dtype, shape]).encode() + b"\n"


def _header(file: Path) -> dict[str, _Stored]:
    """Read a safetensors header: its length in 8 little-endian bytes, then JSON, then the tensors' bytes."""
    size = file.stat().st_size
    with file.open("rb") as source:
        prefix = source.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            raise ValueError(f"{file}: not a complete safetensors file")
        entries = json.loads(source.read(length))
    base = 8 + length
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        if base + end > size:
            raise ValueError(f"{file}: tensor {name!r} ends beyond the file; the file was cut off")
        tensors[name] = _Stored(file, entry["dtype"], entry["shape"], base + start, end - start)
    return tensors


def _blocks(stored: _Stored) -> Iterator[bytes]:
    with stored.file.open("rb") as source:
        source.seek(stored.start)
        left = stored.size
        while left:
            block = source.read(min(BLOCK, left))
            if not block:
                raise ValueError(f"{stored.file}: the file was cut off while it was read")
            left -= len(block)
            yield block
