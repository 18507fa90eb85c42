"""How many groups are begun with oversampling, how many are needed, and how many are still to be refilled."""

from collections import Counter
from fractions import Fraction
from math import ceil, floor

import numpy as np
import pyarrow as pa

from tasks.arrays.columns import texts
from tasks.arrays.ragged import Ragged
from tasks.arrays.samples import COMPONENTS
from tasks.runtime.stored_rows import StoredRows, rows_of

WEIGHTS_OF_GROUPS = ("group_id", *(f"{component}_weights" for component in COMPONENTS))
"""The columns of table samples that say which groups there is something to train on of."""


def num_begun(num_needed: int, factor: float) -> int:
    """Return how many groups are begun for `num_needed`: the factor times as many, rounded up.

    The factor is read as the decimal that a person wrote: 1.1 times 10 is 11, and not a little more.
    """
    return ceil(num_needed * _exact(factor))


def num_needed(num_begun: int, factor: float) -> int:
    """Return how many of the groups begun are needed: the inverse of `begun`."""
    return floor(num_begun / _exact(factor))


def num_wanted(assigned: pa.Table, oversampling: float) -> int:
    """Return how many of the groups of some assignments a step needs, over all environments."""
    begun = Counter(_environments(assigned).values())
    return sum(num_needed(count, oversampling) for count in begun.values())


def oversampled_turn(turn: int, factor: float) -> int:
    """Return where in its walk an environment stands that was to have had `turn` turns, all of them oversampled.

    No example is left out between two steps; the last of one step may be the first of the next.
    """
    return floor(turn * _exact(factor))


def _exact(factor: float) -> Fraction:
    return Fraction(repr(factor))


def groups_to_refill(
    first: pa.Table, assigned: pa.Table, credits: pa.Table | StoredRows, oversampling: float = 1.0
) -> dict[str, int]:
    """Return by environment how many groups of the step's first assignment have no replacement; none where all have.

    `assigned` are all rollouts that the step has assigned, the first ones among them. With oversampling the first
    assignment begins more than the step needs, and what is more needs no replacement.
    """
    found = admitted_groups(credits)
    begun = Counter(_environments(first).values())
    lacking = Counter({name: num_needed(count, oversampling) for name, count in begun.items()})
    lacking.subtract(environment for group, environment in _environments(assigned).items() if group in found)
    return {name: count for name, count in sorted(lacking.items()) if count > 0}


def admitted_groups(credits: pa.Table | StoredRows) -> set[str]:
    """Return the groups that have a token which training weighs; the first of a sample is predicted from nothing."""
    return set[str]().union(*map(_admitted_groups, rows_of(credits).parts(WEIGHTS_OF_GROUPS)))


def _admitted_groups(credits: pa.Table) -> set[str]:
    streams = [Ragged.of(credits[f"{component}_weights"]) for component in COMPONENTS]
    weighed = np.any([stream.values != 0 for stream in streams], axis=0)
    weighed[streams[0].offsets[:-1][streams[0].lengths > 0]] = False
    groups = texts(credits["group_id"])
    return {groups[row] for row in np.unique(streams[0].row_of_value[weighed])}


def _environments(assigned: pa.Table) -> dict[str, str]:
    """Return the environment of each group."""
    return dict(zip(texts(assigned["group_id"]), texts(assigned["environment"]), strict=True))
