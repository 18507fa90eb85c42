"""The digest of a policy's weights, of its files or of tensors in memory. Importing this module imports no torch."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.policies.manifest import file_sha256, weights_digest
from storage.refs import File

OPTIMIZER_PREFIX = "optimizer"
"""What the names of files of optimizer state begin with."""
OPTIMIZER_FILE = "optimizer.safetensors"
"""Optimizer state beside weights in float32, which one rank writes."""
INDEX_FILE = "model.safetensors.index.json"
DIGEST_KIND = "weights_sha256"
"""Where the metadata of an index has `files` for this, the policy's digest is one of its files."""


def weight_paths(directory: Path) -> list[Path]:
    """Return the files of a directory that hold weights, in order of name."""
    return sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(OPTIMIZER_PREFIX))


def weights_sha256(directory: str | Path) -> str:
    """Return the SHA-256 over all tensors in a directory's weight files, in order of name.

    For each tensor: its name, safetensors dtype and shape as one JSON line, then its bytes. How the tensors are spread
    over files does not matter; optimizer state is left out. Weights that all ranks wrote have the digest of a manifest
    in place of that, over the digests of their files, as their index says.
    Raises ValueError when there is no weight file, when one is damaged, or when a name occurs twice.
    """
    if _has_file_digest(Path(directory)):
        return weights_digest([File(p.name, p.stat().st_size, file_sha256(p)) for p in weight_paths(Path(directory))])
    import torch
    from safetensors import SafetensorError, safe_open

    files: dict[str, tuple[Path, Any]] = {}
    for path in weight_paths(Path(directory)):
        try:
            file = safe_open(path, "pt")
        except SafetensorError as error:
            raise ValueError(f"{path}: not a complete safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118
            if name in files:
                raise ValueError(f"{directory}: tensor {name!r} is in {files[name][0].name} and {path.name}")
            files[name] = path, file
    if not files:
        raise ValueError(f"{directory}: no weights in *.safetensors")
    digest = hashlib.sha256()
    for name, (_, file) in sorted(files.items()):
        stored = file.get_slice(name)
        digest.update(_line(name, stored.get_dtype(), stored.get_shape()))
        # As bytes, because numpy has no bfloat16; a view of the mapped file, so that nothing is copied into memory.
        digest.update(file.get_tensor(name).reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensors_sha256(tensors: Mapping[str, npt.NDArray[np.float32]]) -> str:
    """Return the digest that float32 arrays, by name, would have once saved."""
    digest = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        digest.update(_line(name, "F32", list(array.shape)))
        digest.update(np.ascontiguousarray(array, dtype="<f4").data)
    return digest.hexdigest()


def relative_difference(found: str | Path, expected: str | Path) -> float:
    """Return the norm of the difference of the weights in two directories over the norm of `expected`'s.

    Infinite where they do not hold the same tensors. One tensor of each is in memory at a time.
    """
    ours, theirs = (_float_tensors(Path(directory)) for directory in (found, expected))
    if {name: file.get_slice(name).get_shape() for name, file in ours.items()} != {
        name: file.get_slice(name).get_shape() for name, file in theirs.items()
    }:
        return math.inf
    squares = np.zeros(2)
    for name in theirs:
        ours_64, theirs_64 = (of[name].get_tensor(name).double().numpy() for of in (ours, theirs))
        squares += (np.square(ours_64 - theirs_64).sum(), np.square(theirs_64).sum())
    return math.sqrt(squares[0] / squares[1]) if squares[1] else math.inf


def _float_tensors(directory: Path) -> dict[str, Any]:
    """Return the open file of each tensor of a directory's weights."""
    from safetensors import safe_open

    files = [safe_open(path, "pt") for path in weight_paths(directory)]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def _has_file_digest(directory: Path) -> bool:
    index = directory / INDEX_FILE
    return index.is_file() and json.loads(index.read_text()).get("metadata", {}).get(DIGEST_KIND) == "files"


def over_base(base_sha256: str, adapter_sha256: str) -> str:
    """Return the digest of a policy that is an adapter over the weights of another."""
    return hashlib.sha256(json.dumps([base_sha256, adapter_sha256]).encode()).hexdigest()


def _line(name: str, dtype: str, shape: list[int]) -> bytes:
    return json.dumps([name, dtype, shape]).encode() + b"\n"
