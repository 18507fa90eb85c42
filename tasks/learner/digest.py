"""The digest of a policy's weights, of its files or of tensors in memory. Importing this module imports no torch."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

OPTIMIZER_FILE = "optimizer.safetensors"


def weights_sha256(directory: str | Path) -> str:
    """Return the SHA-256 over all tensors in a directory's weight files, in order of name.

    For each tensor: its name, safetensors dtype and shape as one JSON line, then its bytes. How the tensors are spread
    over files does not matter; optimizer state is left out. Raises ValueError when there is no weight file, when one
    is damaged, or when a name occurs twice.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    files = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        if path.name == OPTIMIZER_FILE:
            continue
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
    """Return the norm of the difference of the float32 weights in two directories over the norm of `expected`'s.

    Infinite where they do not hold the same tensors. One tensor of each is in memory at a time.
    """
    ours, theirs = (_float_tensors(Path(directory)) for directory in (found, expected))
    if {name: file.get_slice(name).get_shape() for name, file in ours.items()} != {
        name: file.get_slice(name).get_shape() for name, file in theirs.items()
    }:
        return math.inf
    squares = np.zeros(2)
    for name in theirs:
        ours_64, theirs_64 = (np.asarray(of[name].get_tensor(name), np.float64) for of in (ours, theirs))
        squares += (np.square(ours_64 - theirs_64).sum(), np.square(theirs_64).sum())
    return math.sqrt(squares[0] / squares[1]) if squares[1] else math.inf


def _float_tensors(directory: Path) -> dict[str, Any]:
    """Return the open file of each tensor of a directory's weights."""
    from safetensors import safe_open

    files = [safe_open(path, "np") for path in sorted(directory.glob("*.safetensors")) if path.name != OPTIMIZER_FILE]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def over_base(base_sha256: str, adapter_sha256: str) -> str:
    """Return the digest of a policy that is an adapter over the weights of another."""
    return hashlib.sha256(json.dumps([base_sha256, adapter_sha256]).encode()).hexdigest()


def _line(name: str, dtype: str, shape: list[int]) -> bytes:
    return json.dumps([name, dtype, shape]).encode() + b"\n"
