"""Paired: how two policies differ on the same examples, which tells more than two intervals that overlap.

The difference is taken example by example, so that what examples have in common, being hard, say, is in neither's
favour: the paired analysis of Miller 2024, "Adding Error Bars to Evals" (arXiv 2411.00640), section 4.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import pyarrow as pa

from tasks.evaluation.confidence import Interval, students
from tasks.evaluation.stage import example_means, example_passes, rewards_of


@dataclass(frozen=True)
class Difference:
    """One figure before and after, over the examples that both have it for."""

    environment: str
    figure: str
    """avg, or pass@k."""
    before: float | None
    after: float | None
    difference: float | None
    """after - before; None where no example has both."""
    interval: Interval | None
    """Confidence interval of `difference`; None where it is the same on all examples, or there are fewer than two."""
    num_examples: int


def paired_differences(
    before: pa.Table, after: pa.Table, pass_at: Sequence[int] = (1,), pass_reward: float = 1.0
) -> list[Difference]:
    """Return how the figures of each environment that both tables of traces have differ, in order of name."""
    one, other = rewards_of(before), rewards_of(after)
    found = []
    for name in sorted(one.keys() & other.keys()):
        found.append(_difference(name, "avg", example_means(one[name]), example_means(other[name])))
        for k in pass_at:
            pair = (example_passes(each[name], k, pass_reward) for each in (one, other))
            found.append(_difference(name, f"pass@{k}", *pair))
    return found


def _difference(environment: str, figure: str, one: Mapping[str, float], other: Mapping[str, float]) -> Difference:
    both = sorted(one.keys() & other.keys())
    if not both:
        return Difference(environment, figure, None, None, None, None, 0)
    before, after = fmean(one[each] for each in both), fmean(other[each] for each in both)
    steps = [other[each] - one[each] for each in both]
    return Difference(environment, figure, before, after, after - before, students(steps), len(both))
