"""The checksum of weights, by which an engine shows that it holds what the learner published. Imports no torch.

It is the number of values, and the sums of their bit patterns and of the squares of these, modulo 2 to the 64, each
value in the engine's precision. The sums do not depend on how weights are sharded, fused, split or transposed: those of
a learner's shards add up to those of an engine's matrices; a flipped bit or an old matrix changes them. They do not see
two matrices exchanged: the log-probs of a probe do.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MODULUS = 1 << 64
CHUNK = 1 << 17
"""Values that are summed at once: widened to 8 bytes each they stay in a processor's cache."""
GPU_CHUNK = 1 << 22
"""The same on a GPU: each chunk takes six kernels, and memory that no plan has."""
PRECISIONS = ("bfloat16", "float16", "float32")
SUMS_FILE = "weights_sums.json"
"""A file beside a policy's weights: by precision and name, the checksum of each tensor as the learner had it."""


class WeightsSum(NamedTuple):
    """The checksum of some weights."""

    num_values: int = 0
    total: int = 0
    """The sum of their bit patterns, modulo 2 to the 64."""
    squares: int = 0
    """The sum of the squares of their bit patterns, modulo 2 to the 64."""


def add_sums(sums: Iterable[Sequence[int]]) -> WeightsSum:
    """Return the checksum of all."""
    return WeightsSum(*(sum(numbers) % MODULUS for numbers in zip(*sums, strict=True)))


def precision_of(tensor: Any) -> str:
    """Return the name of a tensor's precision."""
    return str(tensor.dtype).removeprefix("torch.")


def sum_tensor(weight: Any, dtype: str) -> WeightsSum:
    """Return the checksum of a tensor in the precision `dtype`, taken on its device."""
    import torch

    sums = torch.zeros(2, dtype=torch.int64, device=weight.device)  # sums and products wrap around
    for part in weight.detach().reshape(-1).split(CHUNK if weight.device.type == "cpu" else GPU_CHUNK):
        bits = part.to(getattr(torch, dtype)).view(torch.int32 if dtype == "float32" else torch.int16)
        wide = bits.to(torch.int64).bitwise_and_(0xFFFFFFFF if dtype == "float32" else 0xFFFF)
        sums[0] += wide.sum()
        sums[1] += wide.mul_(wide).sum()
    return WeightsSum(weight.numel(), *(number % MODULUS for number in sums.tolist()))
