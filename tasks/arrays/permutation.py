"""The order in which the environments of a run take turns, and that of the examples of each.

Everything here is a pure function of the slot's number in the run, so a run that is resumed or made longer meets the
same examples. Hashes are of our own making: numpy does not promise the same random stream in its next version.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from tasks.arrays.ragged import Integers


def digest(*parts: object) -> int:
    """Return 64 bits that depend on every part and on nothing else."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def shares(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in the proportion of the weights, read as the decimals a person wrote."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    divisor = gcd(*whole)
    return [number // divisor for number in whole]


def turns(whole_shares: Sequence[int], start: int, count: int) -> list[tuple[int, int]]:
    """Return, for slots `start` to `start + count` of the run, whose turn it is and how many turns that one had before.

    A slot goes to whoever is furthest behind its share of all slots so far; ties go to the first. Nobody is ever a
    whole turn ahead, so each period of `sum(whole_shares)` slots is shared out exactly and leaves nobody ahead.
    """
    period = sum(whole_shares)
    had = [share * (start // period) for share in whole_shares]
    chosen: list[tuple[int, int]] = []
    # A whole period leaves nobody ahead, so that counting may begin with the period of the first slot.
    for slot in range(start - start % period, start + count):
        deficits = [share * (slot + 1) - period * number for share, number in zip(whole_shares, had, strict=True)]
        turn = deficits.index(max(deficits))
        if slot >= start:
            chosen.append((turn, had[turn]))
        had[turn] += 1
    return chosen


def permutation(count: int, seed: int) -> Integers:
    """Return the numbers below `count` in an order that depends on `seed` (64 bits) alone.

    Sorts by the SplitMix64 finaliser (Steele, Lea and Flood 2014) of seed plus multiples of its golden gamma.
    """
    # Products and sums of uint64 wrap around, as the hash is defined.
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable").astype(np.int64)
