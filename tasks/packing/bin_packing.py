"""Bins: which samples share a row, so that rows are full and ranks finish together.

Best-fit decreasing finds the tightest row by bisection. With several ranks every micro-step waits for its slowest
row, so rows are filled evenly by estimated cost and neighbours in cost share a micro-step.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tasks.arrays.ragged import Integers

CROSSOVER_TOKENS = 54_000
"""Segment length at which causal attention costs as much as the matrix products: 6 * parameters floating-point
operations per token against 6 * layers * hidden * length, for 8e9 parameters, 36 layers and a hidden size of 4096."""
MOST_BALANCED_SAMPLES = 5_000
"""Above this many samples even rows take seconds to find, and chance has evened them out anyway."""

Rows = list[list[int]]


def estimated_costs(lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the cost of each segment in tokens' worth of matrix products: n + n^2 / CROSSOVER_TOKENS."""
    tokens = np.asarray(lengths, np.float64)
    return tokens + tokens**2 / CROSSOVER_TOKENS


def best_fit(lengths: Sequence[int], capacity: int) -> Rows:
    """Return rows of sample numbers, none over `capacity`: longest sample first, each into the tightest row it fits."""
    rows: Rows = []
    # One sorted list of free space and row number, packed into a single integer, is what bisect searches fastest.
    width = max(1, len(lengths)).bit_length()
    spaces: list[int] = []
    for sample in longest_first(lengths):
        length = lengths[sample]
        assert length <= capacity, f"sample {sample} of {length} tokens does not fit {capacity}"
        place = bisect_left(spaces, length << width)
        if place < len(spaces):
            space = spaces.pop(place)
            row = space & ((1 << width) - 1)
            rows[row].append(sample)
            insort(spaces, space - (length << width))
        else:
            insort(spaces, (capacity - length) << width | len(rows))
            rows.append([sample])
    return rows


def balanced_rows(lengths: Sequence[int], capacity: int, num_ranks: int) -> Rows:
    """Return rows of about equal cost, their number the smallest multiple of `num_ranks` that was found to do.

    Longest sample first, each into the cheapest row with room for it. Rows may be empty when samples are few.
    """
    fewest = -(-len(best_fit(lengths, capacity)) // num_ranks) * num_ranks
    for num_rows in range(fewest, fewest + len(lengths) + num_ranks, num_ranks):
        rows = _spread(lengths, capacity, num_rows)
        if rows is not None:
            return rows
    raise AssertionError("one row for each sample always does")


def _spread(lengths: Sequence[int], capacity: int, num_rows: int) -> Rows | None:
    """Return `num_rows` rows filled evenly by cost, or None if some sample finds no row with room."""
    costs = estimated_costs(lengths).tolist()
    rows: Rows = [[] for _ in range(num_rows)]
    room = [capacity] * num_rows
    cheapest = [(0.0, row) for row in range(num_rows)]
    for sample in longest_first(lengths):
        place = next((i for i, (_, row) in enumerate(cheapest) if room[row] >= lengths[sample]), None)
        if place is None:
            return None
        cost, row = cheapest.pop(place)
        rows[row].append(sample)
        room[row] -= lengths[sample]
        insort(cheapest, (cost + costs[sample], row))
    return rows


def pack(lengths: Sequence[int], capacity: int, num_ranks: int) -> Rows:
    """Return rows in the order of the batch: costliest first, their number a multiple of `num_ranks`, some maybe empty.

    Row `i` goes to rank `i % num_ranks` at micro-step `i // num_ranks`.
    """
    if num_ranks == 1 or len(lengths) > MOST_BALANCED_SAMPLES:
        rows = best_fit(lengths, capacity)
    else:
        rows = balanced_rows(lengths, capacity, num_ranks)
    rows += [[] for _ in range(-len(rows) % num_ranks)]
    costs = estimated_costs(lengths)
    order = np.argsort([-costs[row].sum() for row in rows], kind="stable")
    return [rows[row] for row in order]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return sample numbers by falling length, ties in order."""
    order: Integers = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    numbers: list[int] = order.tolist()
    return numbers
