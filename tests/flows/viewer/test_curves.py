"""The charts of a run's page, as the address asks for them: runs, axes, smoothing, zoom, choice and order."""

import json
import re
from shutil import copytree
from typing import Any

import polars as pl
import pytest

from flows.queries.request import PageRequest
from flows.queries.spread import identical_replies
from flows.queries.store_reader import StoreReader
from flows.reporting.usual_range import band_exit
from flows.viewer import addresses
from flows.viewer.drawings import chart
from flows.viewer.pages.runs import run_page
from flows.viewer.rendering import as_html
from tests.fixtures.rehearsal import rehearse


def page(library: StoreReader, run: str = "base", **query: str) -> Any:
    asked = PageRequest(addresses.run(run), {"run": run}, query)
    return run_page(library, asked), asked


def titles(values: Any, section: str = "") -> list[str]:
    return [chart["title"] for each in values["sections"] if section in ("", each["title"]) for chart in each["charts"]]


def drawn(library: StoreReader, title: str, **query: str) -> Any:
    """Return what the chart of a title tells its script."""
    html = as_html(*page(library, **query)).decode()
    found = re.search(f'aria-label="{title}, by step" data-chart="([^"]*)"', html)
    assert found, title
    return json.loads(found[1].replace("&#34;", '"').replace("&quot;", '"'))


def test_a_chart_of_zeros_is_only_named(forked):
    values, asked = page(forked)
    assert values.values["zeros"] and not {*values.values["zeros"]} & {*titles(values.values)}
    assert f"Always zero: {', '.join(values.values['zeros'])}." in as_html(values, asked).decode()
    assert page(forked, to="0")[0].values["zeros"] == values.values["zeros"], "the loss is zero at the first step alone"


def test_links_of_a_chart_keep_what_else_was_asked(forked):
    html = as_html(*page(forked, spread="1", smooth="5")).decode()
    assert "spread=1&amp;smooth=5&amp;with=fork#curves" in html


def test_runs_stand_in_one_chart(forked):
    told = drawn(forked, "Rollouts", **{"with": "fork"})
    assert [(each["name"], each["values"]) for each in told["series"]] == [("base", [12, 12]), ("fork", [12, 12])]
    assert [each["steps"] for each in told["series"]] == [[0, 1], [0, 1]]


def test_runs_of_other_lengths_stand_in_one_chart_and_the_table_has_those_of_the_page(forked, tmp_path):
    copytree(forked.store.root.address, tmp_path / "store")
    rehearse(tmp_path / "store", "short", steps=1)
    library = StoreReader.at(tmp_path / "store")
    told = drawn(library, "Loss", **{"with": "short"})
    assert [(each["name"], each["steps"]) for each in told["series"]] == [("base", [0, 1]), ("short", [0])]
    for run, other, num_steps in (("base", "short", 2), ("short", "base", 1), ("fork", "base", 2)):
        values, asked = page(library, run, **{"with": f"{other},{run},{other}"})
        assert [each["run"] for each in values.values["curves"]["runs"]] == [run, other]
        table = as_html(values, asked).decode().split('id="numbers"')[1]
        rows = re.findall(r'<tr><td class="number"><a href="([^"]*)">', table)
        assert {*rows} == {addresses.step(run, step) for step in range(num_steps)}


def test_curves_may_run_over_tokens_and_time(forked):
    for axis, unit in (("tokens", "tokens"), ("time", "min")):
        told = drawn(forked, "Reward", x=axis)
        assert told["across"] == unit and told["steps"] == [0, 1] and told["x"][0] < told["x"][1]
    by_step = next(each for each in page(forked)[0].values["sections"][0]["charts"] if each["title"] == "Reward")
    over = next(
        each for each in page(forked, x="tokens")[0].values["sections"][0]["charts"] if each["title"] == "Reward"
    )
    assert [each["x"] for each in by_step["steps"]] == [0.0, 1.0] and over["steps"][0]["x"] > 1


def test_a_stretch_of_steps_is_drawn_alone_and_smoothing_keeps_what_was(forked):
    assert drawn(forked, "Reward", **{"from": "1"})["steps"] == [1]
    every, smoothed = drawn(forked, "Reward"), page(forked, smooth="5")[0].values
    reward = next(each for each in smoothed["sections"][0]["charts"] if each["title"] == "Reward")["series"][0]
    first, last = (float(f"{each:.5g}") for each in reward["raw"])
    assert every["series"][0]["values"] == [first, last]
    assert reward["values"] == [reward["raw"][0], pytest.approx(sum(reward["raw"]) / 2)]


def test_the_spread_of_rewards_and_identical_replies_are_read_where_asked_for(forked):
    assert "Spread of rewards" not in titles(page(forked)[0].values)
    shown, _ = page(forked, spread="1")
    charts = {each["title"]: each for section in shown.values["sections"] for each in section["charts"]}
    zeros = shown.values["zeros"]
    assert [sum(each) for each in charts["Spread of rewards"]["cells"]] == charts["Spread of rewards"]["series"][0][
        "values"
    ]
    assert "Identical replies" in {*charts, *zeros}
    assert drawn(forked, "Spread of rewards", spread="1")["cells"]


def test_replies_to_one_example_that_say_the_same_are_identical():
    told = [("e1", "a"), ("e1", "a"), ("e1", "b"), ("e2", "a")]
    same = {"run": "base", "for_training": True, "step": 3, "environment": "words"}
    rows = [same | {"example_id": each, "reply": reply} for each, reply in told]
    assert identical_replies(pl.DataFrame(rows), [2, 3])["series"][0]["values"] == [None, 0.5]


def test_a_figure_that_leaves_its_band_is_marked_in_its_chart():
    steps = [{"step": each} for each in range(30)]
    drawn: Any = {"title": "Entropy", "series": [{"name": "entropy", "values": [1.0] * 20 + [5.0] * 10}]}
    cut = {**drawn, "series": [{"name": "entropy", "values": [1.0] * 20}], "exit": {"step": 20, "description": ""}}
    left = band_exit(drawn["series"][0]["values"], list(range(30)))
    assert left and "&#34;exit&#34;:20.0" in chart({**drawn, "exit": left}, steps)
    assert "&#34;exit&#34;:null" in chart(cut, steps[:20]), "that step is not shown"
