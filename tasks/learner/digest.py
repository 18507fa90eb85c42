"""The digest of a policy's weights, of its files or of tensors in memory. Importing this module imports no torch."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

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


def over_base(base_sha256: str, adapter_sha256: str) -> str:
    """Return the digest of a policy that is an adapter over the weights of another."""
    return hashlib.sha256(json.dumps([base_sha256, adapter_sha256]).encode()).hexdigest()


def _line(name: str, dtype: str, shape: list[int]) -> bytes:
    return json.dumps([name, dtype, shape]).encode() + b"\n"
