"""The checksum by which an engine's weights are compared with a policy's files, exactly and without a copy.

It is the number of values, and the sums of their bit patterns and of the squares of these, modulo 2 to the 64, each
value in the engine's precision. The sums do not depend on how an engine fuses, splits or transposes matrices, so they
equal those of the files; a flipped bit or an old matrix changes them. They do not see two matrices exchanged: the
log-probs of a probe do. What an engine's workers say of their parts is added: see `read_back`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.inference.engine.weights_view import EMBEDDINGS, HEAD, read_header, weight_files

MODULUS = 1 << 64
CHUNK = 1 << 22
"""Values that are summed at once: the patterns are widened to 8 bytes each."""
BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
"""The patterns of an engine's precisions."""
STORED = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
"""The precisions of files that can be compared, as the safetensors format names them."""


@dataclass(frozen=True)
class WeightsSum:
    """The checksum of some weights."""

    count: int = 0
    """Values."""
    total: int = 0
    """The sum of their bit patterns, modulo 2 to the 64."""
    squares: int = 0
    """The sum of the squares of their bit patterns, modulo 2 to the 64."""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "WeightsSum":
        """Return the checksum in a worker's answer."""
        return cls(answer["count"], answer["total"], answer["squares"])

    def plus(self, other: "WeightsSum") -> "WeightsSum":
        """Return the checksum of both."""
        return WeightsSum(
            self.count + other.count, (self.total + other.total) % MODULUS, (self.squares + other.squares) % MODULUS
        )


def sum_files(directory: str | Path, dtype: str, *, own_head: bool) -> WeightsSum | None:
    """Return the checksum that an engine of precision `dtype` has with the weights in `directory`.

    With `own_head` the engine has an output head of its own, also where the files tie it to the embedding. Returns None
    where the files have a precision that is none of `STORED`. Raises WeightsUnusable for damaged files.
    """
    result = WeightsSum()
    embedding, has_head = WeightsSum(), False
    for name, stored, content in _stored_tensors(weight_files(Path(directory))):
        if stored not in STORED:
            return None
        found = _sum_values(content, STORED[stored], dtype)
        result = result.plus(found)
        has_head |= name == HEAD
        if name in EMBEDDINGS:
            embedding = found
    return result if has_head or not own_head else result.plus(embedding)


def sum_adapter(directory: str | Path, dtype: str) -> WeightsSum | None:
    """Return the checksum that an engine of precision `dtype` has with the adapter in `directory`, in peft's format.

    The engine multiplies the factors B by alpha / rank, in its own precision, when it loads them. Returns None where
    the files have a precision that is none of `STORED`, or the adapter is scaled in another way.
    """
    settings = json.loads((Path(directory) / "adapter_config.json").read_text(encoding="utf-8"))
    if any(settings.get(name) for name in ("use_rslora", "rank_pattern", "alpha_pattern")):
        return None
    scaling, result = settings["lora_alpha"] / settings["r"], WeightsSum()
    for name, stored, content in _stored_tensors([Path(directory) / "adapter_model.safetensors"]):
        if stored not in STORED:
            return None
        result = result.plus(_sum_values(content, STORED[stored], dtype, scaling if ".lora_B." in name else 1.0))
    return result


def _stored_tensors(paths: list[Path]) -> Iterator[tuple[str, str, "np.ndarray[Any, Any]"]]:
    """Yield the name, precision and bytes of all tensors in safetensors files."""
    for path in paths:
        tensors, start = read_header(path)
        content = np.memmap(path, dtype=np.uint8, mode="r")
        for name, entry in tensors.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            yield name, entry["dtype"], content[begin:end]


def _sum_values(content: "np.ndarray[Any, Any]", stored: Any, dtype: str, scaling: float = 1.0) -> WeightsSum:
    result = WeightsSum()
    # By bytes: a tensor in a file may begin at any offset.
    size = CHUNK * np.dtype(stored).itemsize
    for first in range(0, len(content), size):
        values = np.frombuffer(content[first : first + size].tobytes(), stored)
        bits = _bits(values, dtype)
        result = result.plus(_sum_bits(bits if scaling == 1 else _scale_bits(bits, dtype, scaling)))
    return result


def _bits(values: "np.ndarray[Any, Any]", dtype: str) -> "np.ndarray[Any, Any]":
    """Return the bit patterns of values in another precision; bfloat16 is given by its patterns."""
    stored_bfloat = values.dtype == np.uint16
    if stored_bfloat and dtype == "bfloat16":
        return values
    exact = (values.astype(np.uint32) << 16).view(np.float32) if stored_bfloat else values
    if dtype != "bfloat16":
        return exact.astype(dtype).view(BITS[dtype])
    wide = exact.astype(np.float32).view(np.uint32)
    # Rounded to the nearest, ties to even, as torch does: a half, less one bit where the last one kept is even.
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def _scale_bits(bits: "np.ndarray[Any, Any]", dtype: str, scaling: float) -> "np.ndarray[Any, Any]":
    """Return the bit patterns of values times `scaling`: multiplied in float32 and rounded, as torch does."""
    values = bits if dtype == "bfloat16" else bits.view(dtype)
    exact = (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values.astype(np.float32)
    return _bits(exact * np.float32(scaling), dtype)


def _sum_bits(bits: "np.ndarray[Any, Any]") -> WeightsSum:
    wide = bits.astype(np.uint64)  # whose products and sums wrap around
    return WeightsSum(len(bits), int(wide.sum()), int(np.dot(wide, wide)))


def sum_tensor(weight: Any, dtype: str) -> WeightsSum:
    """Return the checksum of a tensor in the precision `dtype`."""
    import torch

    result, flat = WeightsSum(), weight.detach().reshape(-1)
    for part in flat.split(CHUNK):
        bits = part.to(getattr(torch, dtype)).view(torch.int32 if dtype == "float32" else torch.int16)
        wide = bits.to(torch.int64) & (0xFFFFFFFF if dtype == "float32" else 0xFFFF)  # sums and products wrap around
        total, squares = torch.stack([wide.sum(), (wide * wide).sum()]).tolist()
        result = result.plus(WeightsSum(part.numel(), total % MODULUS, squares % MODULUS))
    return result
