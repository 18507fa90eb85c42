"""The page of a run: charts and where they lead, ledger, time, and what was said; and every metric of it by itself."""

import polars as pl
import pytest

from flows.cli.run_report import describe
from flows.queries.metrics import matching, metrics, numbers
from flows.queries.request import PageRequest
from flows.queries.store_reader import StoreReader
from flows.reporting.formats import DASH
from flows.viewer.pages.runs import run_page
from storage.store import open_store
from tests.fixtures.builders import trace
from tests.fixtures.evaluations import Sampler, train
from tests.flows.viewer.hand_made import RUN
from tests.flows.viewer.looking import Elements, answer, pluck
from tests.flows.viewer.stepped import begun


def told(reader, run=RUN, **query):
    return run_page(reader, PageRequest(f"/runs/{run}", {"run": run}, query))


def charts(page):
    return {chart["title"]: chart for section in page.values["sections"] for chart in section["charts"]}


def listed(page):
    """The names of the metrics in the page's list."""
    return {metric["name"] for group in page.values["metrics"]["groups"] for metric in group["metrics"]}


def series(page, title, name="values"):
    return {one["name"]: one[name] for one in charts(page)[title]["series"]}


@pytest.fixture
def two(hand):
    """Two steps of two environments and two agents in one of them; the second step has no error."""
    rows = [
        trace("a", environment="debate", agent="pro", reward=1.0),
        trace("b", environment="debate", agent="con", reward=-1.0),
        trace("c", environment="sums", reward=0.5),
        trace("d", environment="sums", reward=None, error_class="timeout"),
    ]
    hand.step(rows, [])
    hand.step([{**row, "trace_id": f"{row['trace_id']}2", "error_class": None} for row in rows], [], step=1)
    return hand.reader


def test_the_charts_hold_what_was_measured(forked):
    page = told(forked, "base")
    rollouts = forked.store.ledger.entries(run="base", stage="rollout")
    rewards = [pl.DataFrame(forked.store.read(entry.slices("traces"), ["reward"]))["reward"] for entry in rollouts]
    (reward,) = charts(page)["Reward"]["series"]
    assert reward["values"] == pytest.approx([values.mean() for values in rewards])
    assert reward["high"][0] - reward["low"][0] == pytest.approx(2 * rewards[0].std(ddof=0))
    drawn = [[*series(page, title).values()] for title in ("Loss", "Rollouts")]
    assert drawn == [[[0.0, 0.1]], [[12.0, 12.0]]]
    assert "Reward by environment" not in charts(page)
    named = {one.get("measure") for chart in charts(page).values() for one in chart["series"]} - {None}
    assert len(named) > 20 and named <= listed(page), "each line leads to a metric that is there"


def test_a_fork_shows_what_it_shares(forked):
    table = told(forked, "fork").values["ledger"]
    assert table["stages"] == ["assignment", "rollout", "filtering", "advantage", "packing", "metrics"]
    assert pluck(table["legend"], "run", "num_pieces") == [("fork", 6), ("base", 6)] and table["steps"] == [0, 1]
    looks = {(cell["row"], cell["class"]) for cell in table["cells"]}
    assert looks == {*((row, "s1 shared") for row in range(3)), *((row, "s0") for row in range(3, 6))}
    frame = forked.frames("fork")["slices"].collect()
    assert set(frame.filter("own")["stage"]) == {"advantage", "metrics", "packing"}
    shared = frame.filter(own=False, stage="rollout")
    assert set(shared["computed_by"]) == {"base"} and shared["used_by"].to_list()[0] == ["base", "fork"]
    values = told(forked, "fork").values
    assert values["parent"] == "base" and told(forked, "base").values["forks"] == ["fork"]
    assert {"key": "algorithm.type", "a": "grpo", "b": "rloo", "in_keys": True} in values["differences"]


def test_a_run_without_work_and_an_unfinished_step_say_so(tmp_path):
    store = open_store(tmp_path / "empty")
    store.runs.record(run="a", event="started", kind="train", config={"name": "a", "steps": 3})
    empty = StoreReader.at(tmp_path / "empty")
    run, listed = (answer(empty, address)[1] for address in ("/runs/a", "/"))
    assert "This run has no rollouts yet" in run
    words = {word.strip() for word in Elements(run).texts + Elements(listed).texts}
    assert "None" not in words and DASH in words, "what is not known is a dash"
    page = told(begun(tmp_path / "begun", 2))
    assert pluck(page.values["steps"], "step", "finished") == [(0, False)]
    assert charts(page) == {} and page.live, "its numbers are shown when it is finished"


def test_environments_and_agents_have_lines_and_colours_of_their_own(two):
    page = told(two)
    assert series(page, "Reward by environment") == {"debate": [0.0, 0.0], "sums": [0.5, 0.5]}
    assert series(page, "Reward by agent: debate") == {"con": [-1.0, -1.0], "pro": [1.0, 1.0]}
    colours = {pair for chart in charts(page).values() for pair in pluck(chart["series"], "name", "colour")}
    named = {pair for pair in colours if pair[0] in ("all", "debate", "sums")}
    assert named == {("all", "s0"), ("debate", "s1"), ("sums", "s2")}, "one colour in all charts"


def test_what_was_counted_and_did_not_happen_is_zero_and_anything_else_a_gap(two):
    page = told(two)
    assert series(page, "Errors")["timeout"] == [0.25, 0.0]
    assert series(page, "Outcomes") == {"errored/timeout": [1.0, 0.0], "pending": [3.0, 4.0]}
    assert set(series(page, "Outcomes", "kind").values()) == {"bars"}


@pytest.mark.engine  # a whole run
def test_evaluations_are_points_that_lead_to_them(tmp_path):
    root = tmp_path / "store"
    held_out = {"num_examples": 4, "attempts": 1, "every": 1, "at_start": True}
    train(root, "a", Sampler(), steps=2, evaluation=held_out)
    reader = StoreReader.at(root)
    shown = describe(reader.store, "a", reader.config("a"))["evaluations"]
    held, scores = charts(told(reader, "a"))["Held-out average"], [each["scores"][0] for each in shown]
    (points,) = held["series"]
    assert held["versions"] == [0, 1, 2] == pluck(shown, "version")
    assert points["values"] == pluck(scores, "average") and points["kind"] == "points"
    assert points["low"][0] == scores[0]["interval"]["low"] and points["values"][0] < points["values"][2]
    assert pluck(held["steps"], "address") == [f"/runs/a/evaluations/{version}" for version in range(3)]


def test_words_find_metrics_by_name_unit_and_environment(two):
    every = metrics(numbers(two, RUN))
    assert pluck(matching(every, "TIMEOUT share"), "name") == ["errored_rollout/timeout"]
    (rewards,) = matching(every, "reward/mean")  # its whole name, which is the begin of no search
    assert rewards["name"] == "reward/mean" and len(matching(every, "reward mean")) > 1
    assert matching(every, "") == every and matching(every, "nothing like it") == []
    assert listed(told(two, metric="timeout")) == {"errored_rollout/timeout", "accounting/errored/timeout"}
