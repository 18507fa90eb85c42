"""Evaluation: estimators by hand, against enumeration, and with errors in plain sight."""

from itertools import combinations

import pytest

from tasks.evaluation import PassAt, estimates, pass_at_k
from tests.builders import failed, table, trace


def estimated(rows, **options):
    return estimates(table("traces", rows), **options)


def attempts(example, *rewards, environment="reverse"):
    """One trace per reward; None is an attempt that timed out."""
    return [
        (failed if reward is None else trace)(
            f"{environment}-{example}-{i}", reward=reward, example_id=example, environment=environment
        )
        for i, reward in enumerate(rewards)
    ]


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 0, 4) == 0.0 and pass_at_k(4, 4, 1) == 1.0 and pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - 100 * 99 * 98 / (200 * 199 * 198))


def test_pass_at_k_is_the_share_of_all_choices_of_k():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                choices = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_that_does_not_exist_is_an_error(n, c, k):
    with pytest.raises(ValueError, match="does not exist"):
        pass_at_k(n, c, k)


def test_averages_by_hand_and_by_environment():
    rows = [*attempts("a", 1.0, 0.0), *attempts("b", 0.5, 0.5), *attempts("a", 0.25, environment="sums")]
    first, second = estimated(rows, pass_at=(1, 2))
    assert (first.environment, first.num_examples, first.num_attempts) == ("reverse", 2, 4)
    assert first.average == first.average_floor == 0.5 and first.errors == {}
    assert first.pass_at == (PassAt(1, 0.25, 2, 0.25), PassAt(2, 0.5, 2, 0.5))
    assert second.environment == "sums" and second.average == 0.25 and second.pass_at[1] == PassAt(2, None, 0, None)


def test_errors_are_counted_and_make_the_floor():
    rows = [*attempts("a", 1.0, None), *attempts("b", None, None)]
    (found,) = estimated(rows, pass_at=(1, 2))
    assert found.errors == {"timeout": 3} and found.num_attempts == 4 and found.num_examples == 2
    assert found.average == 1.0 and found.average_floor == 0.25
    assert found.pass_at == (PassAt(1, 1.0, 1, 0.25), PassAt(2, None, 0, 0.5))


def test_an_error_with_a_reward_is_an_error():
    (found,) = estimated([trace("a", reward=1.0, error_class="infrastructure")])
    assert found.errors == {"infrastructure": 1} and found.average is None and found.average_floor == 0.0


def test_no_reward_without_an_error_is_counted_too():
    (found,) = estimated([trace("a", reward=None), trace("b", reward=0.5)])
    assert found.errors == {"unscored": 1} and found.average == 0.5 and found.average_floor == 0.25


def test_nothing_scored_is_none_and_not_zero():
    (found,) = estimated(attempts("a", None))
    assert found.average is None and found.average_floor == 0.0 and found.pass_at == (PassAt(1, None, 0, 0.0),)


def test_what_passes_is_a_choice():
    rows = attempts("a", 0.6, 0.4)
    assert estimated(rows)[0].pass_at[0].estimate == 0.0
    assert estimated(rows, pass_reward=0.5)[0].pass_at[0].estimate == 0.5


def test_seats_of_others_are_no_attempts():
    (found,) = estimated([trace("a"), trace("judge", reward=0.0, trainable=False)])
    assert found.num_attempts == 1 and found.average == 1.0


def test_no_traces_no_estimates():
    assert estimated([]) == []
