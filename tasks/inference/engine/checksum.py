"""The checksum by which an engine's weights are compared with a policy's files, exactly and without a copy.

It is the number of values, and the sums of their bit patterns and of the squares of these, modulo 2 to the 64, each
value in the engine's precision. The sums do not depend on how an engine fuses, splits or transposes matrices, so they
equal those of the files; a flipped bit or an old matrix changes them. They do not see two matrices exchanged: the
log-probs of a probe do. The engine's workers take both sums (`read_back`).
"""

from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from tasks.inference.engine.weights_view import read_weights

MODULUS = 1 << 64
CHUNK = 1 << 22
"""Values that are summed at once: the patterns are widened to 8 bytes each."""
PRECISIONS = ("bfloat16", "float16", "float32")


class WeightsSum(NamedTuple):
    """The checksum of some weights."""

    num_values: int = 0
    total: int = 0
    """The sum of their bit patterns, modulo 2 to the 64."""
    squares: int = 0
    """The sum of the squares of their bit patterns, modulo 2 to the 64."""

    def plus(self, other: "WeightsSum") -> "WeightsSum":
        """Return the checksum of both."""
        total, squares = self.total + other.total, self.squares + other.squares
        return WeightsSum(self.num_values + other.num_values, total % MODULUS, squares % MODULUS)


def add_sums(sums: Iterable[WeightsSum]) -> WeightsSum:
    """Return the checksum of all."""
    return reduce(WeightsSum.plus, sums, WeightsSum())


def sum_files(directory: str | Path, dtype: str, *, own_head: bool, device: Any = "cpu") -> WeightsSum | None:
    """Return the checksum that an engine of precision `dtype` has with the weights in `directory`, taken on a device.

    With `own_head` the engine has an output head of its own, also where the files tie it to the embedding. Returns None
    where the files have a precision that is none of PRECISIONS. Raises WeightsUnusable for damaged files.
    """
    result = WeightsSum()
    for _, tensor in read_weights(Path(directory), untie=own_head):
        if precision_of(tensor) not in PRECISIONS:
            return None
        result = result.plus(sum_tensor(tensor.to(device), dtype))
    return result


def precision_of(tensor: Any) -> str:
    """Return the name of a tensor's precision."""
    return str(tensor.dtype).removeprefix("torch.")


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
