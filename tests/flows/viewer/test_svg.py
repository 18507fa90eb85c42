"""Drawings: where values lie; what a gap, a NaN and a single point look like; that no text gets out of its place."""

import json
import math
import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from flows.reporting.svg import MOST_POINTS, Scale, around, attributes, label, text, thin, ticks
from flows.viewer.svg.charts import cell_class, chart, ledger, sparkline, timeline

HOSTILE = "</text><script>alert(1)</script>\"' onload=x \x1b[31m\u202e&"


def steps(count: int, **unfinished: bool) -> list[dict[str, Any]]:
    return [{"step": n, "address": f"/runs/a/steps/{n}", "finished": str(n) not in unfinished} for n in range(count)]


def drawn(values: list[float | None], **more: Any) -> ElementTree.Element:
    series = {"name": "mean", "values": values, **more}
    return ElementTree.fromstring(chart({"title": "Reward", "series": [series]}, steps(len(values))))


def lines(svg: ElementTree.Element, name: str = "line") -> list[str]:
    return [each.attrib["d"] for each in svg.iter("path") if each.get("class") == name]


def test_a_line_goes_through_its_values_and_leaves_gaps() -> None:
    svg = drawn([0.0, 1.0, None, 2.0, 3.0, None, 5.0])
    (line,) = lines(svg)
    assert line.count("M") == 2 and line.count("L") == 2, "two stretches of two points"
    assert len([each for each in svg.iter("circle")]) == 5, "the point alone between gaps is a dot too"
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", line)]
    assert heights == sorted(heights, reverse=True), "more is higher"
    assert lines(drawn([1.0, None, 1.0])) == [], "no line over a gap, not even down to zero"
    assert lines(drawn([1.0, 0.0, 1.0]))[0].count("L") == 2
    svg = drawn([0.5])
    assert lines(svg) == [] and len(list(svg.iter("circle"))) == 1


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_marked_and_moves_no_axis(odd: float) -> None:
    svg, plain = drawn([1.0, odd, 3.0]), drawn([1.0, None, 3.0])
    assert len(lines(svg, "odd")) == 1 and lines(plain, "odd") == []
    assert axis(svg) == axis(plain)
    told = json.loads(svg.attrib["data-chart"])
    assert told["series"][0]["values"][1] in ("NaN", "∞", "-∞") and "NaN" not in json.dumps(told["y"])


def axis(svg: ElementTree.Element) -> list[str | None]:
    return [each.text for each in svg.iter("text")]


def test_values_of_any_size_have_ticks_of_their_own() -> None:
    assert ticks(0.0, 1.1e-13) == [0.0, 5e-14, 1e-13] and ticks(0.0, 3e-300, 4) == [0.0, 1e-300, 2e-300, 3e-300]
    assert ticks(0.0, 0.7, 8)[3] == 0.3 and ticks(0.0, 4e9, 5) == [0.0, 1e9, 2e9, 3e9, 4e9]
    for size in (1e-13, 1e-6, 1.0, 1e6):
        labels = axis(drawn([0.0, 1.1 * size]))
        upwards = labels[: labels.index("step")]
        assert len(upwards) == len(set(upwards)) >= 3


def test_what_is_counted_across_is_said() -> None:
    assert "step" in axis(drawn([1.0, 2.0]))
    series = {"name": "mean", "values": [1.0]}
    told = ElementTree.fromstring(chart({"title": "Held-out", "across": "policy", "series": [series]}, steps(1)))
    assert "policy" in axis(told) and "step" not in axis(told)
    assert json.loads(told.attrib["data-chart"])["across"] == "policy"


def test_a_wide_chart_has_more_room_and_the_same_values() -> None:
    one = {"title": "Reward", "series": [{"name": "mean", "values": [1.0, 2.0]}]}
    narrow, wide = (ElementTree.fromstring(chart({**one, "wide": wide}, steps(2))) for wide in (False, True))
    assert float(wide.attrib["viewBox"].split()[2]) > 2 * float(narrow.attrib["viewBox"].split()[2])
    values = [json.loads(each.attrib["data-chart"])["series"] for each in (narrow, wide)]
    assert values[0] == values[1]


def test_a_chart_says_where_its_steps_are() -> None:
    told = json.loads(drawn([0.1, None, 0.3, math.nan]).attrib["data-chart"])
    assert [f"{told['to']}{step}" for step in told["steps"]] == [f"/runs/a/steps/{n}" for n in range(4)]


def test_a_band_lies_between_its_ends_and_stops_where_one_is_missing() -> None:
    (band,) = lines(drawn([1.0, 1.0, 1.0], low=[0.0, 0.0, None], high=[2.0, 2.0, 2.0]), "band")
    assert band.count("L") == 3, "two steps up and two back"
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", band)]
    assert heights[0] == heights[1] < heights[2] == heights[3]


def test_points_have_intervals() -> None:
    svg = drawn([1.0, 1.0], low=[0.5, None], high=[1.5, None], kind="points")
    assert len(lines(svg, "interval")) == 1 and lines(svg) == [] and len(list(svg.iter("circle"))) == 2


def test_bars_stand_on_each_other() -> None:
    series = [{"name": name, "values": [1.0, None], "kind": "bars"} for name in ("one", "other")]
    svg = ElementTree.fromstring(chart({"title": "Seconds", "series": series}, steps(2)))
    lower, upper = (each.attrib for each in svg.iter("rect"))
    assert float(upper["y"]) + float(upper["height"]) == pytest.approx(float(lower["y"]), abs=0.11)
    assert lower["height"] == upper["height"]


def test_a_step_that_is_not_finished_is_hollow() -> None:
    made = chart({"title": "r", "series": [{"name": "m", "values": [1.0, 2.0]}]}, steps(2, **{"1": False}))
    assert [each.get("class") for each in ElementTree.fromstring(made).iter("circle")] == ["dot", "dot unfinished"]


def test_nothing_to_draw_is_an_empty_chart() -> None:
    assert lines(ElementTree.fromstring(chart({"title": "r", "series": []}, []))) == []


def test_texts_stay_in_their_place() -> None:
    svg = chart({"title": HOSTILE, "series": [{"name": HOSTILE, "values": [1.0]}]}, steps(1))
    element = ElementTree.fromstring(svg)
    assert "<script" not in svg and "\x1b" not in svg and "\u202e" not in svg
    assert {name for each in element.iter() for name in each.attrib} & {"onload"} == set()
    assert "script" in element.attrib["aria-label"]
    (series,) = json.loads(element.attrib["data-chart"])["series"]
    assert series["name"].startswith("</text>") and not {"\x1b", "\u202e"} & set(series["name"]), (
        "the tip shows it as it is"
    )
    assert attributes(a_b='"<', class_=None, x=1.04) == ' a-b="&#34;&lt;" x="1"'
    assert text(1, 2, "<b>\x00") == '<text x="1" y="2">&lt;b&gt;␀</text>'


@pytest.mark.parametrize(
    ("values", "zero", "ends"),
    [
        ([], False, (0.0, 1.0)),
        ([math.nan, math.inf], False, (0.0, 1.0)),
        ([2.0], False, (1.0, 3.0)),
        ([0.0], True, (0.0, 1.0)),
        ([0.0, 1.0], True, (0.0, 1.06)),
        ([-1.0, 1.0], False, (-1.12, 1.12)),
    ],
)
def test_the_ends_of_a_scale(values: list[float], zero: bool, ends: tuple[float, float]) -> None:
    assert around(values, zero) == pytest.approx(ends)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-0.02, 0.013), (0, 48_000), (1e-13, 3e-12), (7, 7.5), (0, 199)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high, 5)
    assert 1 <= len(found) <= 5 and all(low - 1e-12 <= each <= high for each in found)
    widths = [round((b - a) / 10 ** math.floor(math.log10(b - a)), 6) for a, b in pairwise(found)]
    assert set(widths) <= {1.0, 2.0, 5.0}


@pytest.mark.parametrize(
    ("value", "words"), [(0, "0"), (0.5, "0.5"), (48_000, "48k"), (2e6, "2M"), (1e-13, "1e-13"), (-0.0002, "-2e-4")]
)
def test_a_tick_is_short(value: float, words: str) -> None:
    assert label(value) == words


def test_many_points_are_thinned_and_every_peak_is_kept() -> None:
    values: list[float | None] = [math.sin(n / 50) for n in range(5000)]
    values[1234], values[3456], values[777], values[4000] = 9.0, -9.0, None, math.nan
    places = thin([values])
    assert {0, 1234, 3456, 4000, 4999} <= set(places) and 777 not in places
    assert len(places) <= MOST_POINTS + 2 and places == sorted(set(places))
    assert thin([values[:MOST_POINTS]]) == list(range(MOST_POINTS)), "few are all drawn"


def test_a_scale_goes_both_ways() -> None:
    scale = Scale(0, 10, 100, 0)
    assert [scale.at(value) for value in (0, 5, 10)] == [100, 50, 0]


def test_a_sparkline_has_gaps_and_an_end() -> None:
    svg = ElementTree.fromstring(sparkline([None, 1.0, 2.0, None, 3.0, 4.0], "reward"))
    (line,) = lines(svg)
    assert line.count("M") == 2 and len(list(svg.iter("circle"))) == 1
    assert sparkline([None, math.nan], "reward") == ""


def told(**more: Any) -> dict[str, Any]:
    cell = {
        "key": "k" * 32,
        "by": 1,
        "finished": False,
        "rows": {"traces": 4},
        "seconds": 1.5,
        "used_by": ["a", HOSTILE],
    }
    columns = [{"step": 0, "cells": [cell, None]}, {"step": 1, "cells": []}]
    return {"stages": ["rollout", "evaluation"], "columns": columns, "runs": ["a", HOSTILE], **more}


def test_the_ledger_shows_whose_each_cell_is() -> None:
    svg = ledger(told(), {"0": "/runs/a/steps/0"})
    element = ElementTree.fromstring(svg)
    looks = [each.attrib["class"] for each in element.iter("rect")]
    assert looks == ["cell s1 shared unfinished", "cell planned"]
    (title,) = (each.text or "" for each in element.iter("title"))
    assert "4 traces" in title and "key kkkkkkkk" in title and "in parts so far" in title and "used by a" in title
    assert "<script" not in svg and [each.attrib["href"] for each in element.iter("a")] == ["/runs/a/steps/0"]
    assert [cell_class(by) for by in (0, 1, 7, 8)] == ["s0", "s1", "s7", "s1"], "own work alone has the first colour"


def test_a_timeline_shows_begin_and_end_and_what_happened() -> None:
    bars = [
        {"step": 3, "key": "k" * 32, "finished": True, "seconds": 5.0, "tokens": 7, "start": 2.0, "end": 7.0, "row": 0}
    ]
    events = [{"event": HOSTILE, "look": "bad", "at": 1.0}]
    lanes = [{"stage": "rollout", "rows": 1, "colour": 0, "bars": bars}]
    svg = timeline({"length": 10.0, "lanes": lanes, "events": events, "ticks": [], "cuts": []}, {"3": "/s/3"})
    element = ElementTree.fromstring(svg)
    (rect,) = element.iter("rect")
    scale = Scale(0, 10, 142.0, 1306.0)
    assert float(rect.attrib["x"]) == pytest.approx(scale.at(2.0), abs=0.1)
    assert float(rect.attrib["width"]) == pytest.approx(scale.at(7.0) - scale.at(2.0), abs=0.1)
    assert "<script" not in svg and "step 3: rollout, 5.0 s, 7 tokens" in svg
