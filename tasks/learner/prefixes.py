"""Finds what segments of a packed row have in common from their first token on, so that it is computed once.

All rollouts of a task begin with its prompt, and branches of a trace with what came before them. The states that a
layer gives a token depend on it and on the tokens before it in its segment. Where these are the same, so are the
states, and their gradient is the sum over the segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

WORTH = 8
"""Prefixes are shared where that saves at least one of so many tokens: keys and values are copied for it."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Which tokens of a packed row of T tokens are computed, so that none is computed twice."""

    computed: Array
    """Where in the row the tokens are that are computed, rising, int64 (t,)."""
    places: Array
    """Where among these is what stands for each token of the row, int64 (T,)."""
    borders: tuple[int, ...]
    """Borders of what is computed of each segment, which is its end: 0, then the running sum up to t."""


def shared_prefixes(token_ids: Array, borders: Sequence[int]) -> SharedPrefixes | None:
    """Return what need not be computed again of a row (T,) with these segment borders; None where that is too little.

    Sorted by their tokens, segments lie beside those that they have the longest prefix in common with. The last token
    of a segment is always computed, so that no segment is empty.
    """
    first_like = np.arange(len(token_ids))
    cut = sorted((token_ids[start:end].tobytes(), start, end) for start, end in pairwise(borders))
    for (_, other, other_end), (_, start, end) in pairwise(cut):
        length = _common(token_ids[other:other_end], token_ids[start : end - 1])
        first_like[start : start + length] = first_like[other : other + length]
    own = first_like == np.arange(len(token_ids))
    computed = np.flatnonzero(own)
    if WORTH * (len(own) - len(computed)) < len(own):
        return None
    counted = np.append(0, own.cumsum())
    return SharedPrefixes(computed, counted[first_like], tuple(counted[list(borders)].tolist()))


def _common(one: Array, other: Array) -> int:
    """Return how many tokens two segments have in common from the first on."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size
