"""Drawings: what a chart tells its script; sparkline, ledger; that no text gets out of its place."""

import json
import math
from xml.etree import ElementTree

import pytest

from flows.reporting.formats import visible
from flows.reporting.svg import MOST_POINTS, thin
from flows.viewer.drawings import cell_class, chart
from flows.viewer.rendering import templates

HOSTILE = "</text><script>alert(1)</script>\"' onload=x \x1b[31m\u202e&"


def steps(count):
    return [{"step": n, "address": f"/runs/a/steps/{n}"} for n in range(count)]


def figures(values, of=None, **more):
    """What a chart of one series tells its script."""
    drawn = {"title": "Reward", "series": [{"name": "mean", "values": values}], **more}
    return json.loads(ElementTree.fromstring(chart(drawn, of or steps(len(values)))).attrib["data-chart"])


def test_a_chart_tells_places_values_and_where_its_steps_are():
    found = figures([0.123456789, None, math.nan, math.inf, -math.inf])
    assert found["series"][0]["values"] == [0.12346, None, "NaN", "∞", "-∞"]
    assert found["x"] == found["steps"] == [0, 1, 2, 3, 4] and found["across"] == "step"
    assert [f"{found['to']}{step}" for step in found["steps"]] == [f"/runs/a/steps/{n}" for n in range(5)]
    assert figures([1.0, 2.0], [{**each, "x": 0.5} for each in steps(2)])["x"] == [0.5, 0.5]


@pytest.mark.parametrize("count", [2, 1999])
def test_a_heat_map_adds_up_neighbouring_steps_and_leaves_none_out(count):
    found = figures([0.5] * count, cells=[[n, 1] for n in range(count)], range=[0, 1])
    assert len(found["x"]) == len(found["cells"]) == len(found["series"][0]["values"]) <= 100
    assert [sum(counts) for counts in zip(*found["cells"], strict=True)] == [sum(range(count)), count]


def test_without_scripts_a_chart_is_a_sentence_and_its_texts_stay_in_their_place():
    made = visible(chart({"title": HOSTILE, "series": [{"name": HOSTILE, "values": [1.0, None, 2.0]}]}, steps(3)))
    element = ElementTree.fromstring(made)
    assert (element[0].text or "").endswith(": 1 at step 0, 2 at step 2")
    assert "<script" not in made and set(element.attrib) == {"class", "role", "tabindex", "aria-label", "data-chart"}
    (series,) = json.loads(element.attrib["data-chart"])["series"]
    assert not {"\x1b", "\u202e"} & set(series["name"])
    assert ElementTree.fromstring(chart({"title": "r", "series": []}, [])).attrib["aria-label"] == "r, by step"


def test_many_points_are_thinned_and_every_peak_is_kept():
    values = [math.sin(n / 50) for n in range(5000)]
    values[1234], values[3456], values[777], values[4000] = 9.0, -9.0, None, math.nan
    places = thin([values])
    assert {0, 1234, 3456, 4000, 4999} <= set(places) and 777 not in places
    assert len(places) <= MOST_POINTS + 2 and places == sorted(set(places))
    assert thin([values[:MOST_POINTS]]) == list(range(MOST_POINTS)), "few are all drawn"


def test_the_ledger_shows_whose_each_cell_is():
    cell = {"row": 0, "column": 0, "span": 2, "class": "cell s1 shared", "title": HOSTILE, "address": "/runs/a/steps/0"}
    made = visible(templates().get_template("_pictures.html").module.ledger_picture(["rollout"], [0, 1], [cell]))
    assert "<script" not in made
    element = ElementTree.fromstring(made.strip())
    assert [each.text for each in element.iter("title")] == [visible(HOSTILE)]
    assert [each.attrib["href"] for each in element.iter("a")] == ["/runs/a/steps/0"]
    assert [cell_class(by) for by in (0, 1, 7, 8)] == ["s0", "s1", "s7", "s1"], "own work alone has the first colour"
