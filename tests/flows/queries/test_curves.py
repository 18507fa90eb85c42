"""Tests of how curves are shown: smoothed, over tokens and time, several runs in one chart."""

import math

from flows.queries.charts import smooth, together


def test_a_smoothed_value_is_the_mean_of_those_before_it():
    assert smooth([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_what_is_unknown_stays_unknown_and_counts_for_nothing():
    found = smooth([2.0, None, 4.0, math.inf], 3)
    assert found == [2.0, None, 3.0, math.inf]


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
