"""Evaluation: estimators by hand, against enumeration, and with errors in plain sight."""

from dataclasses import replace
from itertools import combinations

import pytest

from configs.evaluation import passes
from tasks.assignment.stage import errored_assignments, latest_attempts
from tasks.evaluation.confidence import Interval, of_mean, students
from tasks.evaluation.stage import Difference, PassAt, estimates, example_passes, paired_differences, pass_at_k
from tests.fixtures.builders import exactly, failed, table, trace


def estimated(rows, **options):
    return estimates(table("traces", rows), **options)


def estimate(rows, **options):
    """The estimates of the only environment."""
    [found] = estimated(rows, **options)
    return found


def shares(found):
    """The shares of an estimate, without their intervals."""
    return tuple(replace(each, interval=None) for each in found.pass_at)


def attempts(example, *rewards, environment="reverse"):
    """One trace per reward; None is an attempt that timed out."""
    return [
        (failed if reward is None else trace)(
            f"{environment}-{example}-{i}", reward=reward, example_id=example, environment=environment
        )
        for i, reward in enumerate(rewards)
    ]


def test_pass_at_k_is_the_share_of_all_choices_of_k():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                choices = list(combinations([True] * c + [False] * (n - c), k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 1, 0), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_that_does_not_exist_is_an_error(n, c, k):
    with pytest.raises(ValueError, match="does not exist"):
        pass_at_k(n, c, k)


def test_what_does_not_exist_is_said_with_what_to_do():
    said = (
        "pass@5 of 1 passes in 4 attempts does not exist: k is at least 1 and, like the passes, at most the attempts. "
        "Lower evaluation.pass_at or raise evaluation.attempts."
    )
    with pytest.raises(ValueError, match=exactly(said)):
        pass_at_k(4, 1, 5)


def test_averages_by_hand_and_by_environment():
    rows = [*attempts("a", 1.0, 0.0), *attempts("b", 0.5, 0.5), *attempts("a", 0.25, environment="sums")]
    first, second = estimated(rows, pass_at=(1, 2))
    assert (first.environment, first.num_examples, first.num_attempts) == ("reverse", 2, 4)
    assert first.average == first.average_floor == 0.5 and first.errors == {}
    assert shares(first) == (PassAt(1, 0.25, 2, 0.25), PassAt(2, 0.5, 2, 0.5))
    assert second.environment == "sums" and second.average == 0.25 and second.pass_at[1] == PassAt(2, None, 0, None)


def test_errors_are_counted_and_make_the_floor():
    rows = [*attempts("a", 1.0, None), *attempts("b", None, None)]
    found = estimate(rows, pass_at=(1, 2))
    assert found.errors == {"timeout": 3} and found.num_attempts == 4 and found.num_examples == 2
    assert found.average == 1.0 and found.average_floor == 0.25
    assert shares(found) == (PassAt(1, 1.0, 1, 0.25), PassAt(2, None, 0, 0.5))


def test_an_error_with_a_reward_is_an_error():
    found = estimate([trace("a", reward=1.0, error_class="infrastructure")])
    assert found.errors == {"infrastructure": 1} and found.average is None and found.average_floor == 0.0


def test_no_reward_without_an_error_is_counted_too():
    found = estimate([trace("a", reward=None), trace("b", reward=0.5)])
    assert found.errors == {"unscored": 1} and found.average == 0.5 and found.average_floor == 0.25


def test_nothing_scored_is_none_and_not_zero():
    found = estimate(attempts("a", None))
    assert found.average is None and found.average_floor == 0.0 and found.pass_at == (PassAt(1, None, 0, 0.0),)


def test_what_passes_is_a_choice():
    rows = attempts("a", 0.6, 0.4)
    assert estimate(rows).pass_at[0].estimate == 0.0
    assert estimate(rows, pass_reward=0.5).pass_at[0].estimate == 0.5


FULL = 0.7 * 1.0 + 0.2 * 1.0 + 0.1 * 1.0
"""What weights of .7, .2 and .1 make of three full rewards."""


def test_a_full_reward_passes_whatever_rounding_made_of_it():
    assert FULL < 1.0
    assert estimate(attempts("a", FULL)).pass_at[0].estimate == 1.0
    (change,) = paired_differences(tried({"a": [0.5]}), tried({"a": [FULL]}))[1:]
    assert change.difference == 1.0


@pytest.mark.parametrize("threshold", [-1e6, -1.0, 0.0, 1e-3, 1.0, 1e6])
def test_the_tolerance_is_of_rounding_and_grows_with_the_threshold(threshold):
    size = 1 + abs(threshold)
    assert passes(threshold, threshold) and passes(threshold - 1e-10 * size, threshold)
    assert not passes(threshold - 1e-8 * size, threshold) and not passes(float("nan"), threshold)


def test_the_threshold_of_a_difference_is_a_choice():
    before, after = tried({"a": [0.25]}), tried({"a": [0.5]})
    assert [paired_differences(before, after, (1,), at)[1].difference for at in (0.5, 0.6)] == [1.0, 0.0]


def test_seats_of_others_are_no_attempts():
    found = estimate([trace("a"), trace("judge", reward=0.0, trainable=False)])
    assert found.num_attempts == 1 and found.average == 1.0


def test_no_traces_no_estimates():
    assert estimated([]) == []


def test_turns_and_tokens_are_of_all_who_took_part_and_not_of_the_first():
    seats = [
        trace("a", num_turns=3, num_input_tokens=10, num_output_tokens=4),
        trace("b", agent="user", trainable=False, num_turns=2, num_input_tokens=20, num_output_tokens=8),
        trace("judge", agent="judge", trainable=False, num_turns=1, num_input_tokens=30, num_output_tokens=1),
    ]
    found = estimate(seats[:1], took_part=table("traces", seats))
    assert (found.num_attempts, found.num_turns, found.num_tokens) == (1, 6, 73)
    assert estimate(seats[:1]).num_turns == 3


def test_where_nobody_is_known_to_have_taken_part_no_cost_is_invented():
    found = estimate([trace("a")], took_part=table("traces", []))
    assert (found.num_attempts, found.num_turns, found.num_tokens) == (1, 0, 0)


def test_a_reward_of_one_passes_unless_told_otherwise():
    assert example_passes({"a": [1.0, 0.5, None], "b": [None]}, 1) == {"a": 0.5}


def test_an_interval_of_payoffs_is_bounded_by_those_of_all_attempts():
    rows = [*attempts("a", 1.0, -1.0), *attempts("b", 1.0, 1.0), *attempts("c", -1.0, -1.0), *attempts("d", 1.0, 0.0)]
    found = estimate(rows)
    means = [0.0, 1.0, -1.0, 0.5]
    assert found.interval == of_mean(means, [1.0, -1.0] * 2) == Interval(-1.0, 1.0) != of_mean(means)


def test_intervals_stand_beside_the_figures():
    rows = [*attempts("a", 1.0, 0.0), *attempts("b", 0.0, 0.0), *attempts("c", 1.0, 1.0)]
    found = estimate(rows, pass_at=(1, 2))
    assert found.average == 0.5 and found.interval == of_mean([0.5, 0.0, 1.0])
    assert [each.interval for each in found.pass_at] == [of_mean([0.5, 0.0, 1.0]), of_mean([1.0, 0.0, 1.0])]


def test_what_was_made_again_takes_the_place_of_the_whole_assignment():
    first = [trace("a1", assignment_id="a"), failed("a2", assignment_id="a"), trace("b1", assignment_id="b")]
    again = [trace("a3", assignment_id="a", reward=0.5)]
    rounds = [table("traces", first), table("traces", again)]
    assert errored_assignments(rounds[0]) == ["a"] and errored_assignments(rounds[1]) == []
    assert latest_attempts(rounds)["trace_id"].to_pylist() == ["b1", "a3"]
    rounds.append(table("traces", [failed("a4", assignment_id="a")]))
    assert latest_attempts(rounds)["trace_id"].to_pylist() == ["b1", "a4"]
    assert latest_attempts(rounds[:1]).equals(rounds[0])


def test_a_failed_attempt_leaves_its_siblings():
    """pass@k of the k - 1 that ended is what it would be had the failed one not been asked for."""
    three, four = attempts("a", 1.0, 0.0, 0.0), attempts("a", 1.0, 0.0, 0.0, None)
    for k in (1, 2, 3):
        alone, beside = estimate(three, pass_at=(k,)), estimate(four, pass_at=(k,))
        assert alone.pass_at[0].estimate == beside.pass_at[0].estimate == pass_at_k(3, 1, k)


def test_an_error_never_passes_whatever_passes():
    found = estimate(attempts("a", -1.0, None), pass_reward=-1.0)
    assert found.pass_at[0].estimate == 1.0 and found.pass_at[0].floor == 0.5


def tried(rewards, environment="reverse"):
    """Return the traces of some examples' attempts; None is one that failed."""
    examples = rewards.items()
    return table(
        "traces", [row for name, values in examples for row in attempts(name, *values, environment=environment)]
    )


def test_a_difference_by_hand():
    before = tried({"a": [0.0, 0.5], "b": [1.0], "c": [0.25], "only": [1.0]})
    after = tried({"new": [0.0], "c": [None], "b": [1.0, 1.0], "a": [0.75]})
    average, passed = paired_differences(before, after)
    assert average == Difference("reverse", "avg", 0.625, 0.875, 0.25, students([0.5, 0.0]), 2)
    assert (passed.figure, passed.before, passed.after, passed.difference) == ("pass@1", 0.5, 0.5, 0.0)
    assert passed.interval is None, "no example differs: that says nothing of how far others would"


def test_examples_count_alike_however_often_they_were_tried():
    rows = [*attempts("a", 1.0), *attempts("b", 0.0, 0.0, 0.0, 1.0, None, None, None, None)]
    found = estimate(rows)
    assert (found.average, found.average_floor) == (0.625, 0.5625)
    assert shares(found) == (PassAt(1, 0.625, 2, 0.5625),)
    assert found.interval == found.pass_at[0].interval == of_mean([1.0, 0.25])


def test_environments_that_only_one_of_two_has_are_left_out():
    assert paired_differences(tried({"a": [1.0]}), tried({"a": [1.0]}, "other")) == []


def test_no_example_in_common_is_no_difference_of_zero():
    (found,) = paired_differences(tried({"a": [1.0]}), tried({"b": [1.0]}), pass_at=())
    assert found == Difference("reverse", "avg", None, None, None, None, 0)
