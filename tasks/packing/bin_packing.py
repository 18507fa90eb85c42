"""Bins: which samples share a row, so that rows are full and ranks finish together.

Best-fit decreasing finds the tightest row by bisection. With several ranks every micro-step waits for its slowest
row, so rows are filled evenly by estimated cost and neighbours in cost share a micro-step. Where the learner computes
the prompt of samples in one row once, samples with the same prompt are packed into the same rows.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from tasks.arrays.ragged import Integers

CROSSOVER_TOKENS = 54_000
"""Segment length at which causal attention costs as much as the matrix products: 6 * parameters floating-point
operations per token against 6 * layers * hidden * length, for 8e9 parameters, 36 layers and a hidden size of 4096."""
MOST_BALANCED_SAMPLES = 5_000
"""Above this many samples even rows take seconds to find, and chance has evened them out anyway."""

ROW_COST = 330
"""What a row costs beside its tokens, in tokens: by arithmetic, casting weights and adding gradients in float32 take
18 ms a row of a model of 4B parameters on an H200, and 8,192 tokens take 450."""

Rows = list[list[int]]
Costs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Prompts:
    """What samples begin with; a row computes the prompt of each group in it once."""

    groups: Integers
    """A number for each sample; samples of one number have the same prompt. Shape [samples]."""
    tokens: Integers
    """Length of each sample's prompt; shape [samples]."""

    def row_costs(self, lengths: Sequence[int], rows: Rows) -> Costs:
        """Return the estimated cost of each row of samples of these lengths, in tokens; shape [rows]."""
        samples = np.array([sample for row in rows for sample in row], np.int64)
        row_of_sample = np.repeat(np.arange(len(rows)), np.array([len(row) for row in rows], np.int64))
        _, first = np.unique(row_of_sample * len(lengths) + self.groups[samples], return_index=True)
        repeated = estimated_costs(self.tokens)[samples]
        repeated[first] = 0
        costs = np.bincount(row_of_sample, estimated_costs(lengths)[samples] - repeated, len(rows))
        return costs.astype(np.float64)


def estimated_costs(lengths: npt.ArrayLike) -> Costs:
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


def balanced_rows(lengths: Sequence[int], capacity: int, num_ranks: int, costs: Costs) -> Rows:
    """Return rows of about equal cost, their number the smallest multiple of `num_ranks` that was found to do.

    `costs` are those of the samples.
    Longest sample first, each into the cheapest row with room for it. Rows may be empty when samples are few.
    """
    fewest = -(-len(best_fit(lengths, capacity)) // num_ranks) * num_ranks
    for num_rows in range(fewest, fewest + len(lengths) + num_ranks, num_ranks):
        rows = _spread(lengths, costs.tolist(), capacity, num_rows)
        if rows is not None:
            return rows
    raise AssertionError("one row for each sample always does")


def _spread(lengths: Sequence[int], costs: Sequence[float], capacity: int, num_rows: int) -> Rows | None:
    """Return `num_rows` rows filled evenly by cost, or None if some sample finds no row with room."""
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
    costs = estimated_costs(lengths)
    if num_ranks == 1 or len(lengths) > MOST_BALANCED_SAMPLES:
        rows = best_fit(lengths, capacity)
    else:
        rows = balanced_rows(lengths, capacity, num_ranks, costs)
    return _costliest_first(rows, np.array([costs[row].sum() for row in rows]), num_ranks)


def pack_by_prompt(lengths: Sequence[int], capacity: int, num_ranks: int, prompts: Prompts) -> Rows:
    """Return rows as `pack` does, with samples of a prompt in as few of them as pays.

    The samples of each prompt are packed into pieces of a row's or half a row's length, and the pieces into rows. Of
    these two batches and that of `pack` the cheapest is returned: what the slowest rank of each micro-step computes,
    times the ranks, and ROW_COST for each row.
    """
    costs_of, full = partial(prompts.row_costs, lengths), num_ranks == 1 or len(lengths) > MOST_BALANCED_SAMPLES
    options = [pack(lengths, capacity, num_ranks)]
    for size in (capacity, max([capacity // 2, *lengths])):
        pieces = _pieces(lengths, prompts.groups, size)
        sizes = [sum(lengths[sample] for sample in piece) for piece in pieces]
        rows = best_fit(sizes, capacity) if full else balanced_rows(sizes, capacity, num_ranks, costs_of(pieces))
        options.append([[sample for piece in row for sample in pieces[piece]] for row in rows])
    batches = [_costliest_first(rows, costs_of(rows), num_ranks) for rows in options]
    return min(batches, key=lambda rows: num_ranks * costs_of(rows)[::num_ranks].sum() + ROW_COST * len(rows))


def _costliest_first(rows: Rows, costs: Costs, num_ranks: int) -> Rows:
    order = np.argsort(-costs, kind="stable")
    return [rows[row] for row in order] + [[] for _ in range(-len(rows) % num_ranks)]


def _pieces(lengths: Sequence[int], groups: Integers, size: int) -> Rows:
    """Return rows of samples of one group each, none over `size`."""
    members = defaultdict[int, list[int]](list)
    for sample, group in enumerate(groups.tolist()):
        members[group].append(sample)
    packed = ((own, best_fit([lengths[sample] for sample in own], size)) for own in members.values())
    return [[own[place] for place in row] for own, rows in packed for row in rows]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return sample numbers by falling length, ties in order."""
    order: Integers = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    numbers: list[int] = order.tolist()
    return numbers
