"""The checksum by which an engine's weights are compared with a policy's files, exactly and without a copy.

It is the number of values, and the sums of their bit patterns and of the squares of these, modulo 2 to the 64, each
value in the engine's precision. The sums do not depend on how an engine fuses, splits or transposes matrices, so they
equal those of the files; a flipped bit or an old matrix changes them. They do not see two matrices exchanged: the
log-probs of a probe do.
"""

from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tasks.inference.engine.weights_view import EMBEDDINGS, HEAD, read_header, weight_files

MODULUS = 1 << 64
CHUNK = 1 << 22
"""Values that are summed at once: the patterns are widened to 8 bytes each."""
BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
"""The patterns of an engine's precisions."""
STORED = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
"""The precisions of files that can be compared, as the safetensors format names them."""


class WeightsSum(NamedTuple):
    """The checksum of some weights."""

    count: int = 0
    """Values."""
    total: int = 0
    """The sum of their bit patterns, modulo 2 to the 64."""
    squares: int = 0
    """The sum of the squares of their bit patterns, modulo 2 to the 64."""

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
    for path in weight_files(Path(directory)):
        tensors, start = read_header(path)
        content = np.memmap(path, dtype=np.uint8, mode="r")
        for name, entry in tensors.items():
            if entry["dtype"] not in STORED:
                return None
            begin, end = (start + offset for offset in entry["data_offsets"])
            found = _sum_values(content[begin:end], STORED[entry["dtype"]], dtype)
            result = result.plus(found)
            has_head |= name == HEAD
            if name in EMBEDDINGS:
                embedding = found
    return result if has_head or not own_head else result.plus(embedding)


def _sum_values(content: "np.ndarray[Any, Any]", stored: Any, dtype: str) -> WeightsSum:
    result = WeightsSum()
    # By bytes: a tensor in a file may begin at any offset.
    size = CHUNK * np.dtype(stored).itemsize
    for first in range(0, len(content), size):
        values = np.frombuffer(content[first : first + size].tobytes(), stored)
        result = result.plus(_sum_bits(_bits(values, dtype)))
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


def _sum_bits(bits: "np.ndarray[Any, Any]") -> WeightsSum:
    wide = bits.astype(np.uint64)  # whose products and sums wrap around
    return WeightsSum(len(bits), int(wide.sum()), int(np.dot(wide, wide)))


class ReadBack:
    """What vLLM's worker gets beside its own methods, by `--worker-extension-cls`."""

    model_runner: Any

    def weights_sum(self) -> dict[str, Any]:
        """Return the checksum of the weights that this worker computes with, their precision, and what its head is.

        `own_head` tells whether the output head is a parameter of its own.
        """
        model = self.model_runner.get_model()
        dtype = str(self.model_runner.model_config.dtype).removeprefix("torch.")
        sums: dict[int, WeightsSum] = {}
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                packed = vars(module).get(PACKED) if name == "weight" else None
                # One that modules share counts once: as the last of them has it, which is a tied output head.
                sums[id(weight)] = packed or sum_tensor(_own_rows(module, weight), dtype)
        result = reduce(WeightsSum.plus, sums.values(), WeightsSum())
        return {**result._asdict(), "dtype": dtype, "own_head": _has_own_head(model)}


def _own_rows(module: Any, weight: Any) -> Any:
    """Return a parameter without the rows by which the engine pads a vocabulary."""
    rows = getattr(module, "org_vocab_size", None)
    return weight if rows is None else weight[:rows]


def _has_own_head(model: Any) -> bool:
    """Tell whether the output head has a parameter of its own."""
    names = [name for name, _ in model.named_parameters()]
    return any(name.replace(".base_layer", "").endswith(HEAD) for name in names)


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


PACKED = "packed_sum"
"""The attribute of a module that keeps the checksum of its packed weight."""


def remember_packed() -> None:
    """Patch the CPU build, which packs matrices for its kernels and drops them, so that their checksums are kept.

    What is kept is the checksum of what was packed last: a packed copy that a reload leaves as it is keeps the old one.
    """
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def pack_and_sum(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if not weight.is_meta and weight.ndim == 2:
            dtype = str(weight.dtype).removeprefix("torch.")
            setattr(layer, PACKED, sum_tensor(_own_rows(layer, weight), dtype) if dtype in BITS else None)
        pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = pack_and_sum
