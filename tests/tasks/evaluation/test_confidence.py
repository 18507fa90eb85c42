"""Confidence intervals: by hand, against known quantiles, and by how often they hold what is estimated."""

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.evaluation.confidence import Interval, alike, of_mean, of_share, students, t_quantile
from tasks.evaluation.stage import pass_at_k


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (120, 1.9799), (10**6, 1.9600)],
)
def test_the_quantiles_of_student_are_those_of_the_tables(degrees, quantile):
    assert t_quantile(degrees) == pytest.approx(quantile, rel=2e-3)


EXPANSION = (
    (1, {1: 1}),
    (4, {3: 1, 1: 1}),
    (96, {5: 5, 3: 16, 1: 3}),
    (384, {7: 3, 5: 19, 3: 17, 1: -15}),
    (92160, {9: 79, 7: 776, 5: 1482, 3: -1920, 1: -945}),
)
"""Abramowitz and Stegun 1964, equation 26.7.5: divisor, and coefficients by the power of the normal quantile."""


@pytest.mark.parametrize("degrees", [3, 4, 10])
def test_other_quantiles_are_the_expansion_to_its_last_coefficient(degrees):
    x = 1.9599639845400545
    terms = (sum(a * x**power for power, a in row.items()) / by for by, row in EXPANSION)
    assert t_quantile(degrees) == pytest.approx(sum(t / degrees**i for i, t in enumerate(terms)), rel=1e-12)


@pytest.mark.parametrize("values", [[0.5, 1.5], [-0.5, 0.5], [0.0, 2.0], [-3.0, 1.5, 7.25], [0.5, 2.5]])
def test_what_is_no_share_may_lie_beyond_0_and_1(values):
    assert of_mean(values) == students(values)


def test_of_rewards_between_0_and_1_the_mean_is_a_share():
    assert of_mean([0.0, 0.0, 1.0]) == of_share(1 / 3, 3) and of_mean([0.25, 0.25]) == of_share(0.25, 2)
    assert of_mean([0.5, 0.5], [0.0, 1.0, 1.0, 0.0]) == of_mean([0.5, 0.5]) == of_share(0.5, 2)


def test_one_game_says_nothing():
    assert of_mean([0.0], [1.0, -1.0]) is None


def test_payoffs_are_bounded_by_their_own_range():
    """As of a game of two seats, of which one wins what the other loses."""
    drawn = of_mean([0.0] * 4, [1.0, -1.0] * 4)
    half = of_share(0.5, 4)
    assert drawn == Interval(2 * half.low - 1, 2 * half.high - 1) and drawn.low == pytest.approx(-drawn.high)
    assert of_mean([1.0, 0.0, -1.0, -1.0]) == Interval(-1.0, 1.0), "Student's, cut at both ends"
    won, lost = of_mean([2.0, 1.0, 2.0]), of_mean([-2.0, -1.0, -2.0])
    assert (won.high, lost.low) == (2.0, -2.0)
    assert won.low == pytest.approx(5 / 3 - t_quantile(2) / 3) and lost.high == pytest.approx(-won.low)
    never_won = of_mean([-1.0, -1.0, -0.2])
    assert never_won.high == 0.0, "0 is in the range, and nothing above it"
    both = of_mean([1.0, 1.0, -1.0, -1.0, 1.0])
    share = of_share(3 / 5, 5)
    assert (both.low, both.high) == pytest.approx((2 * share.low - 1, 2 * share.high - 1))


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 2.0]), min_size=2, max_size=20))
def test_an_interval_of_payoffs_holds_their_mean_within_their_range(values):
    rewards = [*values, -1.0, -1.0, 2.0, 2.0]
    found = of_mean(values, rewards)
    assert -1.0 <= found.low <= fmean(values) + 1e-12 and fmean(values) - 1e-12 <= found.high <= 2.0


def test_what_differs_by_rounding_alone_is_alike():
    assert alike([0.0, 1e-9]) and alike([1e6, 1e6 + 1e-4]) and alike([-1e6, -1e6 - 1e-4])
    assert not alike([0.0, 1.5e-9]) and not alike([1e6, 1e6 + 1e-2])


@pytest.mark.parametrize("count", range(1, 60))
def test_a_share_of_one_reaches_one_and_a_share_of_none_zero(count):
    assert of_share(1.0, count).high == 1.0 and of_share(0.0, count).low == 0.0


def test_wilson_by_hand():
    z2 = 1.959964**2
    found = of_share(0.0, 10)
    assert found.low == 0.0 and found.high == pytest.approx(z2 / (10 + z2), rel=1e-6)
    half = of_share(0.5, 4)
    spread = 1.959964 * (0.25 / 4 + z2 / 64) ** 0.5
    assert half.low == pytest.approx((0.5 + z2 / 8 - spread) / (1 + z2 / 4), rel=1e-6)
    assert half.low + half.high == pytest.approx(1.0)


def test_students_by_hand():
    found = students([1.0, 2.0, 4.0, 5.0])
    half = t_quantile(3) * (10 / 3 / 4) ** 0.5  # the variance is 10/3, over four values
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half))


def test_nothing_can_be_said_of_one_value_or_of_equal_ones():
    assert of_mean([]) is None and of_mean([2.5]) is None and of_mean([2.5, 2.5]) is None
    assert students([0.5]) is None and students([1.0, 1.0]) is None
    assert students([0.3 - 0.1, 0.2, 0.5 - 0.3]) is None, "the same but for rounding"


def test_shares_of_zero_and_one_are_not_certain():
    for value in (0.0, 1.0, 0.5):
        found = of_mean([value] * 8)
        assert found == of_share(value, 8) and found.high - found.low > 0.3


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=20))
def test_an_interval_of_values_between_0_and_1_holds_their_mean_and_stays_there(values):
    found = of_mean(values)
    assert 0.0 <= found.low <= fmean(values) + 1e-12 and fmean(values) - 1e-12 <= found.high <= 1.0


def passes(chance, num_examples, attempts, k):
    """Return pass@k of examples that are as hard as a beta says."""
    found = []
    for _ in range(num_examples):
        right = chance.betavariate(1, 2)
        found.append(pass_at_k(attempts, sum(chance.random() < right for _ in range(attempts)), k))
    return found


def truth(k):
    """E[1 - (1 - p)^k] of p ~ beta(1, 2), whose 1 - p is beta(2, 1): 1 - 2 / (2 + k)."""
    return 1 - 2 / (2 + k)


@pytest.mark.parametrize(
    ("num_examples", "attempts", "k"), [(40, 1, 1), (40, 8, 1), (40, 8, 4), (40, 4, 4), (12, 4, 2)]
)
def test_the_intervals_hold_what_they_estimate_in_about_nineteen_of_twenty_evaluations(num_examples, attempts, k):
    # 400 trials of 0.95 have a standard deviation of 0.011; the seed is fixed, so that this is one outcome for ever.
    chance = random.Random(5)
    found = [of_mean(passes(chance, num_examples, attempts, k)) for _ in range(400)]
    assert 0.925 <= fmean(each.low <= truth(k) <= each.high for each in found) <= 0.98
