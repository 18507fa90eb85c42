"""The charts of a run's page, as the address asks for them: runs, axes, smoothing, zoom, choice and order."""

import json
import re
from html import unescape
from shutil import copytree

import polars as pl
import pytest

from flows.queries.charts import identical_replies
from flows.queries.request import PageRequest
from flows.queries.store_reader import StoreReader
from flows.viewer.drawings import chart
from flows.viewer.pages.runs import run_page
from flows.viewer.rendering import as_html
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer.looking import pluck


def page(library, run="base", **query):
    asked = PageRequest(f"/runs/{run}", {"run": run}, query)
    return run_page(library, asked), asked


def charts(library, run="base", **query):
    """The charts of the page, by their titles."""
    sections = page(library, run, **query)[0].values["sections"]
    return {chart["title"]: chart for section in sections for chart in section["charts"]}


def drawn(library, title, **query):
    """Return what the chart of a title tells its script."""
    html = as_html(*page(library, **query)).decode()
    found = re.search(f'aria-label="{title}, by step" data-chart="([^"]*)"', html)
    assert found, title
    return json.loads(unescape(found[1]))


def test_a_chart_of_zeros_is_only_named(forked):
    values, asked = page(forked)
    assert values.values["zeros"] and not {*values.values["zeros"]} & {*charts(forked)}
    assert f"Always zero: {', '.join(values.values['zeros'])}." in as_html(values, asked).decode()


def test_runs_stand_in_one_chart(forked):
    told = drawn(forked, "Rollouts", **{"with": "fork"})
    expected = [("base", [12, 12], [0, 1]), ("fork", [12, 12], [0, 1])]
    assert pluck(told["series"], "name", "values", "steps") == expected


def test_runs_of_other_lengths_stand_in_one_chart_and_the_table_has_those_of_the_page(forked, tmp_path):
    copytree(forked.store.root.address, tmp_path / "store")
    rehearse(tmp_path / "store", "short", steps=1)
    library = StoreReader.at(tmp_path / "store")
    told = drawn(library, "Loss", **{"with": "short"})
    assert pluck(told["series"], "name", "steps") == [("base", [0, 1]), ("short", [0])]
    for run, other, num_steps in (("base", "short", 2), ("short", "base", 1)):
        values, asked = page(library, run, **{"with": f"{other},{run},{other}"})
        assert pluck(values.values["curves"]["runs"], "run") == [run, other]
        table = as_html(values, asked).decode().split('id="numbers"')[1]
        rows = re.findall(r'<tr><td class="number"><a href="([^"]*)">', table)
        assert {*rows} == {f"/runs/{run}/steps/{step}" for step in range(num_steps)}


def test_curves_may_run_over_tokens_and_time(forked):
    for axis, unit in (("tokens", "tokens"), ("time", "min")):
        told = drawn(forked, "Reward", x=axis)
        assert told["across"] == unit and told["steps"] == [0, 1] and told["x"][0] < told["x"][1]


def test_a_stretch_of_steps_is_drawn_alone_and_smoothing_keeps_what_was(forked):
    assert drawn(forked, "Reward", **{"from": "1"})["steps"] == [1]
    every, (reward,) = drawn(forked, "Reward"), charts(forked, smooth="5")["Reward"]["series"]
    assert every["series"][0]["values"] == [float(f"{value:.5g}") for value in reward["raw"]]
    assert reward["values"] == [reward["raw"][0], pytest.approx(sum(reward["raw"]) / 2)]


def test_the_spread_of_rewards_and_identical_replies_are_read_where_asked_for(forked):
    assert "Spread of rewards" not in charts(forked)
    found, zeros = charts(forked, spread="1"), page(forked, spread="1")[0].values["zeros"]
    spread = found["Spread of rewards"]
    assert [*map(sum, spread["cells"])] == spread["series"][0]["values"]
    assert "Identical replies" in {*found, *zeros}


def test_replies_to_one_example_that_say_the_same_are_identical():
    rows = pl.DataFrame({"example_id": ["e1", "e1", "e1", "e2"], "reply": ["a", "a", "b", "a"]})
    rows = rows.with_columns(run=pl.lit("base"), for_training=True, step=3, environment=pl.lit("words"))
    assert identical_replies(rows, [2, 3])["series"][0]["values"] == [None, 0.5]


def test_the_step_of_a_warning_is_marked_in_its_chart():
    steps, values = [{"step": step} for step in range(30)], [1.0] * 20 + [5.0] * 10
    left = {"step": 20, "description": "entropy grows"}
    for shown, mark in ((30, "20.0"), (20, "null")):  # where that step is not shown, nothing is marked
        series = [{"name": "entropy", "values": values[:shown]}]
        drawn = chart({"title": "Entropy", "series": series, "exit": left}, steps[:shown])
        assert f"&#34;exit&#34;:{mark}" in drawn
