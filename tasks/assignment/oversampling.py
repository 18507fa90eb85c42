"""Oversampling: how many groups are begun for those that a step needs, and how many of them are enough."""

from fractions import Fraction
from math import ceil, floor


def num_begun(num_needed: int, factor: float) -> int:
    """Return how many groups are begun for `num_needed`: the factor times as many, rounded up.

    The factor is read as the decimal that a person wrote: 1.1 times 10 is 11, and not a little more.
    """
    return ceil(num_needed * _exact(factor))


def num_needed(num_begun: int, factor: float) -> int:
    """Return how many of the groups begun are needed: the inverse of `begun`."""
    return floor(num_begun / _exact(factor))


def oversampled_turn(turn: int, factor: float) -> int:
    """Return where in its walk an environment stands that was to have had `turn` turns, all of them oversampled.

    No example is left out between two steps; the last of one step may be the first of the next.
    """
    return floor(turn * _exact(factor))


def _exact(factor: float) -> Fraction:
    return Fraction(repr(factor))
