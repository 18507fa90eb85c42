"""Confidence: how far a mean over examples may be from what it estimates, with no more than their values known.

Examples are taken as drawn independently from all that there might be. Attempts at one example are not independent of
each other, so it is examples that are counted and not attempts: the cluster-robust standard error of Miller 2024,
"Adding Error Bars to Evals" (arXiv 2411.00640), for clusters that count alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, pi, sqrt, tan
from statistics import NormalDist, fmean, stdev

LEVEL = 0.95
"""Share of such intervals that hold what is estimated."""

ROUNDING = 1e-9
"""Share of a value below which two are taken for the same."""


@dataclass(frozen=True)
class Interval:
    """A confidence interval of LEVEL, both ends included."""

    low: float
    high: float


def of_mean(values: Sequence[float], rewards: Sequence[float] = ()) -> Interval | None:
    """Return the confidence interval of a mean of values, one for each example; None where nothing can be said.

    `rewards` are those that the values are means of, where they are not the values themselves: their range bounds the
    interval (`_range`). Where all values are its ends, or all are the same, it is that of a share (`of_share`) on the
    scale of the range, which is honest about few examples and about a mean at an end. Else it is Student's, mean -+ t s
    / sqrt(n), cut to the range.
    """
    if not values:
        return None
    low, high = _range(rewards or values)
    width = high - low
    if isfinite(width) and width > 0 and (all(value in (low, high) for value in values) or alike(values)):
        share = of_share(min(1.0, max(0.0, (fmean(values) - low) / width)), len(values))
        return Interval(low + width * share.low, low + width * share.high)
    found = students(values)
    return found and Interval(max(low, found.low), min(high, found.high))


def _range(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the least and the most that rewards may be, as far as that is known; infinite where it is not.

    That is 0 to 1 where all lie there. Of others, as the payoffs of a game, it is from the least to the most that there
    are, and 0, where some repeat: those of no fixed scale all differ, and the largest of a few of them bounds nothing.
    """
    if all(0 <= reward <= 1 for reward in rewards):
        return 0.0, 1.0
    if alike(rewards) or len({*rewards}) == len(rewards):
        return -inf, inf
    return min(0.0, *rewards), max(0.0, *rewards)


def students(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Return Student's interval of a mean, mean -+ t s / sqrt(n), that holds it in a share `level` of all samples.

    None of fewer than two values, or of equal ones, which know no spread.
    """
    if len(values) < 2 or alike(values):
        return None
    middle, half = fmean(values), t_quantile(len(values) - 1, level) * stdev(values) / sqrt(len(values))
    return Interval(middle - half, middle + half)


def alike(values: Sequence[float]) -> bool:
    """Tell whether values are the same but for what rounding makes of means and differences."""
    return max(values) - min(values) <= ROUNDING * max(1.0, *map(abs, values))


def of_share(share: float, count: int) -> Interval:
    """Return the score interval of a share of `count` independent trials (Wilson 1927, without continuity correction).

    For means of values between 0 and 1 that are no trials it is too wide and never too narrow in the limit, as their
    variance is at most share (1 - share); of values between a and b it is at most (mean - a) (b - mean), which is the
    same on their scale (Bhatia and Davis 2000, "A Better Bound on the Variance", Amer. Math. Monthly 107).
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    spread = z * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    middle, whole = share + z * z / (2 * count), 1 + z * z / count
    low = (middle - spread) / whole if share > 0 else 0.0  # not what rounding leaves of zero
    return Interval(max(0.0, low), min(1.0, (middle + spread) / whole if share < 1 else 1.0))


def t_quantile(degrees: int, level: float = LEVEL) -> float:
    """Return the quantile of Student's t that bounds the middle `level`, right to 0.2 percent at LEVEL.

    Exact for 1 and 2 degrees of freedom; else the expansion of Abramowitz and Stegun 1964, equation 26.7.5. At level
    0.9999 it is 12 percent too small for 3 degrees, and 0.5 for 7.
    """
    p = (1 + level) / 2
    if degrees == 1:
        return tan(pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) / sqrt(2 * p * (1 - p))
    x, n = NormalDist().inv_cdf(p), float(degrees)
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return sum(term / n**power for power, term in enumerate(terms))
