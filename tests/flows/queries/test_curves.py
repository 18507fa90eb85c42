"""Tests of how curves are shown: smoothed, against a band, over tokens and time, several runs in one chart."""

import math

from flows.queries.charts import smooth, together
from flows.reporting.figures import band_exit

STEPS = list(range(100, 140))


def test_a_smoothed_value_is_the_mean_of_those_before_it():
    assert smooth([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_what_is_unknown_stays_unknown_and_counts_for_nothing():
    found = smooth([2.0, None, 4.0, math.inf], 3)
    assert found == [2.0, None, 3.0, math.inf]


def test_a_figure_that_stays_has_no_exit():
    assert band_exit([1.0, 1.3] * 20, STEPS) is None
    # Four in a row are noise.
    assert band_exit([1.0] * 20 + [9.0] * 4 + [1.0] * 16, STEPS) is None


def test_the_first_of_five_outside_is_told_with_how_far_it_went():
    assert band_exit([1.0] * 20 + [3.1] * 20, STEPS) == {"step": 120, "description": "grew to 3.1 x since step 120"}
    assert band_exit([1.0] * 20 + [0.2] * 20, STEPS) == {"step": 120, "description": "fell to 0.2 x since step 120"}


def test_what_was_zero_at_first_leaves_it_above_zero():
    assert band_exit([0.0] * 20 + [0.1] * 20, STEPS) == {"step": 120, "description": "above zero since step 120"}
    for before in (0.0, 1.0):
        left = band_exit([before] * 20 + [-0.1] * 20, STEPS)
        assert left == {"step": 120, "description": "below zero since step 120"}


def test_what_came_back_has_no_exit():
    assert band_exit([1.0] * 20 + [9.0] * 10 + [1.0] * 10, STEPS) is None


def test_gaps_do_not_count_as_values_of_a_band():
    assert band_exit([1.0, None] * 10 + [9.0, None] * 2 + [None] * 16, STEPS) is None
    assert band_exit([-1.0] * 20 + [9.0] * 20, STEPS) is None, "a figure below zero has no band"


def test_runs_stand_in_one_chart_for_each_figure():
    def sections(high: float) -> list[dict[str, object]]:
        series = [{"name": "low", "values": [0.0]}, {"name": "high", "values": [high]}]
        chart = {"title": "Reward", "series": series, "steps": [{"step": 3}]}
        return [{"title": "All", "charts": [chart, {**chart, "title": "Spread", "cells": [[1]]}]}]

    [found] = together({"a": sections(1.0), "b": sections(2.0)})
    assert [each["title"] for each in found["charts"]] == ["Reward: low", "Reward: high"]
    high = found["charts"][1]["series"]
    assert [(each["name"], each["values"], each["place"], each["steps"]) for each in high] == [
        ("a", [1.0], 0, [{"step": 3}]),
        ("b", [2.0], 1, [{"step": 3}]),
    ]
