"""The page of a run: charts and where they lead, ledger, time, and what was said; and every metric of it by itself."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from flows.cli.run_report import describe
from flows.queries.ledger import STAGE_TIMES, lanes, ledger, slices, stage_times
from flows.queries.metrics import ABOUT, About, about, ends, matching, metrics, numbers, steps
from flows.queries.request import BadQuestion, NotThere, PageRequest
from flows.queries.runs import runs
from flows.queries.scores import scores
from flows.queries.store_reader import StoreReader
from flows.reporting.formats import DASH
from flows.viewer import addresses
from flows.viewer.addresses import Page
from flows.viewer.pages.runs import metric_page, run_page
from storage.store import open_store
from tests.fixtures.builders import trace
from tests.fixtures.evaluations import Sampler, evaluate, train
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer.hand_made import RUN, HandMade
from tests.flows.viewer.looking import Elements, visitor
from tests.flows.viewer.stepped import begun

T0 = datetime(2026, 1, 1, tzinfo=UTC)
HOSTILE = "</p><script>alert(1)</script>\x1b[31mred\u202e\n" + "long " * 200 + "end"


def told(library: StoreReader, run: str, **query: str) -> Page:
    return run_page(library, PageRequest(addresses.run(run), {"run": run}, query))


def charts(values: Any) -> dict[str, Any]:
    return {each["title"]: each for section in values["sections"] for each in section["charts"]}


def test_the_charts_hold_what_was_measured(forked: StoreReader) -> None:
    values = told(forked, "base").values
    known = charts(values)
    rewards: list[list[float]] = [
        forked.store.read(entry.slices("traces"), ["reward"])["reward"].to_numpy().tolist()
        for entry in forked.store.ledger.entries(run="base", stage="rollout")
    ]
    means = [sum(own) / len(own) for own in rewards]
    (reward,) = known["Reward"]["series"]
    assert reward["values"] == pytest.approx(means)
    spread = [high - low for low, high in zip(reward["low"], reward["high"], strict=True)]
    assert spread[0] == pytest.approx(2 * (sum((each - means[0]) ** 2 for each in rewards[0]) / 12) ** 0.5)
    assert known["Loss"]["series"][0]["values"] == [0.0, 0.1]
    assert known["Rollouts"]["series"][0]["values"] == [12.0, 12.0]
    stages = [each["name"] for each in known["Seconds by stage"]["series"]]
    assert stages == ["assignment", "rollout", "filtering", "advantage", "packing", "training", "metrics"]
    assert (values["state"], values["steps_done"], values["totals"]["rollouts"]) == ("finished", 2, 24.0)
    assert "Reward by environment" not in known, "there is one environment"


def test_a_fork_shows_what_it_shares_and_planned_steps_have_empty_columns(forked: StoreReader) -> None:
    found = ledger(forked, "fork")
    assert found["stages"] == ["assignment", "rollout", "filtering", "advantage", "packing", "metrics"]
    assert found["runs"] == ["fork", "base"] and found["num_pieces"] == [6, 6]
    for column in found["columns"]:
        assert [cell["by"] for cell in column["cells"]] == [1, 1, 1, 0, 0, 0]
    rollouts, credits = (found["columns"][0]["cells"][place] for place in (1, 3))
    assert rollouts["used_by"] == ["base", "fork"] and credits["used_by"] == ["fork"]
    assert rollouts["rows"] == {"messages": 24, "traces": 12} and rollouts["finished"]
    frame = slices(forked, "fork")
    own = frame.filter(pl.col("own"))["stage"].unique().to_list()
    assert sorted(own) == ["advantage", "metrics", "packing"]
    shared = frame.filter(~pl.col("own") & (pl.col("stage") == "rollout"))
    assert set(shared["computed_by"]) == {"base"} and shared["used_by"].to_list()[0] == ["base", "fork"]
    assert [len(each["cells"]) for each in ledger(forked, "base", 4)["columns"]] == [7, 7, 0, 0]


def test_a_fork_tells_what_was_set_otherwise(forked: StoreReader) -> None:
    values = told(forked, "fork").values
    assert values["parent"] == "base"
    assert {"key": "algorithm.type", "a": "grpo", "b": "rloo", "in_keys": True} in values["differences"]
    assert told(forked, "base").values["forks"] == ["fork"]
    assert values["timeline"]["lanes"] and {lane["stage"] for lane in values["timeline"]["lanes"]} == {
        "advantage",
        "packing",
        "metrics",
    }, "what another run computed was done in that run's time"


def test_times_are_those_of_the_ledger(forked: StoreReader) -> None:
    frame = stage_times(forked, "base")
    assert frame.columns == list(STAGE_TIMES)
    for entry in forked.store.ledger.entries(run="base"):
        (row,) = frame.filter(pl.col("key") == entry.key).to_dicts()
        assert (row["started_at"], row["finished_at"]) == (entry.started_at, entry.finished_at)
        assert row["own"] and row["tokens"] == entry.tokens


def test_a_run_without_work_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.runs.record(run="a", event="started", kind="train", config={"name": "a", "steps": 3})
    with visitor(tmp_path) as client:
        answer = client.get(addresses.run("a"))
        listed = client.get(addresses.runs())
    assert answer.status_code == 200 and "This run has no rollouts yet" in answer.text
    words = {word.strip() for each in (answer, listed) for word in Elements(each.text).texts}
    assert "None" not in words and DASH in words, "what is not known is a dash"


def test_an_unfinished_step_and_odd_values_are_drawn(tmp_path: Path) -> None:
    library = begun(tmp_path, 2)
    values = told(library, RUN).values
    assert values["steps"] == [{"step": 0, "address": addresses.step(RUN, 0), "finished": False}]
    assert charts(values) == {}, "its numbers are shown when it is finished"
    with visitor(library) as client:
        text = " ".join(Elements(client.get(addresses.run(RUN)).text).texts)
    assert "not finished, so the numbers below leave it out" in text
    assert [cell and cell["finished"] for cell in values["ledger"]["columns"][0]["cells"]] == [False]
    assert told(library, RUN).live, "this process wrote the event and is there"


def test_unknown_runs_and_questions_are_refused(forked: StoreReader) -> None:
    with pytest.raises(NotThere, match="there is no run 'none'"):
        told(forked, "none")
    with pytest.raises(BadQuestion, match="timeline='7'"):
        told(forked, "base", timeline="7")


def test_several_environments_and_agents_have_lines_of_their_own(tmp_path: Path) -> None:
    seats = [
        trace(f"t{n}", reward=reward, environment=environment, agent=agent)
        for n, (environment, agent, reward) in enumerate(
            [("debate", "pro", 1.0), ("debate", "con", -1.0), ("sums", "agent", 0.5), ("sums", "agent", None)]
        )
    ]
    HandMade(tmp_path).step(seats, [])
    known = charts(told(StoreReader.at(tmp_path), RUN).values)
    by_name = {each["name"]: each["values"] for each in known["Reward by environment"]["series"]}
    assert by_name == {"debate": [0.0], "sums": [0.5]}
    by_agent = {each["name"]: each["values"] for each in known["Reward by agent: debate"]["series"]}
    assert by_agent == {"con": [-1.0], "pro": [1.0]} and "Reward by agent: sums" not in known


def test_errors_that_did_not_happen_are_zero_and_not_a_gap(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    made.step([trace("a0"), trace("a1", reward=None, error_class="timeout")], [])
    made.step([trace("b0"), trace("b1")], [], step=1)
    chart = charts(told(StoreReader.at(tmp_path), RUN).values)["Errors"]
    assert {each["name"]: each["values"] for each in chart["series"]} == {"all": [0.5, 0.0], "timeout": [0.5, 0.0]}


def work(stage: str, step: int, start: float, end: float, own: bool = True) -> dict[str, Any]:
    at = {"started_at": T0 + timedelta(seconds=start), "finished_at": T0 + timedelta(seconds=end)}
    row = {"run": "a", "step": step, "stage": stage, "key": f"{stage}{step}", "own": own, "computed_by": "a"}
    return row | at | {"finished": True, "seconds": end - start, "tokens": 0}


def test_bars_keep_begin_and_end_and_overlaps_are_seen() -> None:
    spans = (("rollout", 0, 0, 10), ("training", 0, 10, 14), ("rollout", 1, 8, 18), ("rollout", 2, 20, 30))
    rows = [*(work(*each) for each in spans), work("rollout", 3, 0, 99, own=False)]
    found = lanes(pl.DataFrame(rows, schema=STAGE_TIMES), [])
    bars = {lane["stage"]: {bar["step"]: bar for bar in lane["bars"]} for lane in found["lanes"]}
    assert [lane["stage"] for lane in found["lanes"]] == ["rollout", "training"]
    assert (bars["rollout"][1]["start"], bars["rollout"][1]["end"]) == (8.0, 18.0)
    assert [bars["rollout"][step]["row"] for step in (0, 1, 2)] == [0, 1, 0], "side by side where they overlap"
    assert 3 not in bars["rollout"] and found["length"] == 30.0


def test_idle_stretches_are_cut_and_said() -> None:
    rows = [work("rollout", 0, 0, 10), work("rollout", 1, 3600, 3610)]
    events = [{"event": name, "at": T0 + timedelta(seconds=at)} for name, at in (("failed", 11), ("resumed", 3599))]
    found = lanes(pl.DataFrame(rows, schema=STAGE_TIMES), events)
    assert found["cuts"] == [{"at": pytest.approx(10.15), "seconds": 3590.0}]
    assert found["length"] == pytest.approx(20.3)
    assert all(10.0 <= event["at"] <= 10.3 for event in found["events"]), "what came in between stands in between"
    seconds = [tick["seconds"] for tick in found["ticks"]]
    assert seconds == sorted(seconds) and seconds[0] == 0 and seconds[-1] >= 3600


def test_the_last_steps_alone() -> None:
    rows = [work("rollout", step, 10 * step, 10 * step + 9) for step in range(30)]
    found = lanes(pl.DataFrame(rows, schema=STAGE_TIMES), [], recent=5)
    assert [bar["step"] for bar in found["lanes"][0]["bars"]] == [25, 26, 27, 28, 29]
    assert found["lanes"][0]["bars"][0]["start"] == 0.0


@pytest.mark.engine  # two whole runs
def test_evaluations_are_points_that_lead_to_them(tmp_path: Path) -> None:
    root = tmp_path / "store"
    held_out = {"num_examples": 4, "attempts": 1, "every": 1, "at_start": True}
    train(root, "a", Sampler(), steps=2, evaluation=held_out)
    evaluate(root, "b", Sampler(), steps=1, evaluation={"num_examples": 4})
    library = StoreReader.at(root)
    shown = describe(library.store, "a", library.config("a"))["evaluations"]
    held = charts(told(library, "a").values)["Held-out average"]
    (points,) = held["series"]
    assert held["versions"] == [0, 1, 2] == [each["version"] for each in shown]
    assert points["values"] == [each["scores"][0]["average"] for each in shown] and points["kind"] == "points"
    assert points["low"][0] == shown[0]["scores"][0]["interval"]["low"] and points["values"][0] < points["values"][2]
    assert [each["address"] for each in held["steps"]] == [addresses.evaluation("a", n) for n in range(3)]
    assert scores(library, "a")["average"].to_list() == points["values"]
    assert {row["run"]: row["held_out"] for row in runs(library).to_dicts()}["a"] == points["values"][-1]
    (alone,) = told(library, "b").values["evaluations"]
    assert alone["address"] == addresses.evaluation("b", 0)


def test_an_environment_has_one_colour_in_all_charts(tmp_path: Path) -> None:
    rows = [trace(f"t{n}", reward=float(n), environment=name) for n, name in enumerate(("debate", "sums"))]
    HandMade(tmp_path).step(rows, [])
    colours: dict[str, set[str]] = {}
    for each in charts(told(StoreReader.at(tmp_path), RUN).values).values():
        for one in each["series"]:
            if one["name"] in ("all", "debate", "sums"):
                colours.setdefault(one["name"], set()).add(one["colour"])
    assert colours == {"all": {"s0"}, "debate": {"s1"}, "sums": {"s2"}}


def test_a_long_run_has_its_last_numbers_until_all_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.viewer.pages.runs.MOST_NUMBERS", 1)
    made = HandMade(tmp_path)
    for step in range(2):
        made.work("rollout", {"traces": [trace(f"t{step}")]}, step)
    library = StoreReader.at(tmp_path)
    assert [told(library, RUN, **query).values["numbers_from"] for query in ({}, {"numbers": "all"})] == [1, 0]


ODD_NAME = "../<script>alert(1)</script>\u202e?#%"


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    root = tmp_path_factory.mktemp("metrics") / "store"
    rehearse(root, RUN, steps=2)
    return StoreReader.at(root)


@pytest.fixture
def two(tmp_path: Path) -> StoreReader:
    """Two steps of two environments; the second step has no error."""
    made = HandMade(tmp_path)
    named = f'{{"{ODD_NAME}": 3.0}}'
    rows = [
        trace("a", environment="debate", reward=1.0, metrics=named),
        trace("b", environment="sums", reward=None, error_class="timeout"),
    ]
    made.step(rows, [])
    made.step([{**each, "trace_id": f"{each['trace_id']}2", "error_class": None} for each in rows], [], step=1)
    return StoreReader.at(tmp_path)


def listed(library: StoreReader, words: str = "") -> dict[str, Any]:
    found = run_page(library, PageRequest(addresses.run(RUN), {"run": RUN}, {"metric": words})).values["metrics"]
    return {each["name"]: each for group in found["groups"] for each in group["metrics"]}


def opened(library: StoreReader, name: str) -> Any:
    return metric_page(library, PageRequest(addresses.metric(RUN, name), {"run": RUN, "metric": name})).values


def test_every_number_of_every_step_is_there(two: StoreReader) -> None:
    found = {one["name"]: one["values"] for each in metrics(numbers(two, RUN)) for one in each["series"]}
    recorded = steps(two, RUN).drop("run", "step", "finished")
    assert set(found) == set(recorded.columns)
    for name in recorded.columns:
        told = zip(found[name], recorded[name].to_list(), strict=True)
        assert all(shown == value for shown, value in told if value is not None)


def test_what_was_counted_and_is_not_there_is_zero_and_anything_else_a_gap(two: StoreReader) -> None:
    found = listed(two)
    assert [one["values"] for one in found["errored_rollout/timeout"]["series"]] == [[0.5, 0.0], [1.0, 0.0]]
    assert found["accounting/errored/timeout"]["series"][0]["values"] == [1.0, 0.0]
    by_scope = {one["scope"]: one["values"] for one in found["reward/mean"]["series"]}
    assert by_scope == {"all": [1.0, 1.0], "debate": [1.0, 1.0]}, "where nothing was scored there is no line"


def test_words_find_metrics_by_name_unit_and_environment(two: StoreReader) -> None:
    every = metrics(numbers(two, RUN))
    assert [each["name"] for each in matching(every, "TIMEOUT share")] == ["errored_rollout/timeout"]
    assert {each["name"] for each in matching(every, "reward sums")} == set(), "it was not scored"
    assert matching(every, "") == every and matching(every, "nothing like it") == []
    assert set(listed(two, "timeout")) == {"errored_rollout/timeout", "accounting/errored/timeout"}


def test_a_metric_is_named_by_its_measure_or_in_full(two: StoreReader) -> None:
    short, full = opened(two, "reward/mean"), opened(two, "reward/debate/mean")
    assert short == full and short["metric"]["name"] == "reward/mean"
    assert short["previous"] is None or short["previous"]["address"].startswith(f"/runs/{RUN}/metrics/")
    assert short["metric"]["series"][0]["last"] == {"value": 1.0, "step": 1}
    with pytest.raises(NotThere, match=r"has the metric 'reward/men'; the nearest names are .*reward/mean"):
        opened(two, "reward/men")


def test_whatever_an_environment_calls_it_has_an_address_and_does_nothing(two: StoreReader) -> None:
    name = f"metrics/{ODD_NAME}"
    with visitor(two) as client:
        answer = client.get(addresses.metric(RUN, name))
        elements = Elements(answer.text)
        assert answer.status_code == 200 and elements.odd == [] and "\u202e" not in answer.text
        assert client.get(f"{addresses.metric(RUN, name)}?format=json").json()["metric"]["name"] == name
        saved = client.get(f"{addresses.metric(RUN, name)}?format=file")
        assert saved.status_code == 200 and "svg" in saved.text and "script>alert" not in saved.text


def test_the_ends_of_a_series() -> None:
    nan = math.nan
    found = ends([None, 2.0, 1.0, nan, 5.0, -math.inf, None], range(7))
    assert found["first"] == {"value": 2.0, "step": 1} and found["last"] == {"value": -math.inf, "step": 5}
    assert found["least"] == {"value": 1.0, "step": 2} and found["most"] == {"value": 5.0, "step": 4}
    assert set(ends([None], [0]).values()) == {None}


def test_every_metric_of_ours_says_what_it_is(walked: StoreReader) -> None:
    assert [each["name"] for each in metrics(numbers(walked, RUN)) if not each["description"]] == []
    assert about("timing/stage/rollout") == ABOUT["timing/stage"] and about("timing/model") == ABOUT["timing"]
    assert about("update/entropy").unit == "nats" and "last optimizer step" in about("update/entropy").description
    told = [about(name).description.partition(" ")[0] for name in ("update/mismatch_kl", "update/mismatch_kl_max")]
    assert told == ["mean", "most"]
    assert about("updates/ref_kl_loss/mean").unit == "" and about("nobody/knows") == About("", "")


def test_what_became_of_rollouts_is_stacked_by_outcome_with_zeros(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    made.step([trace("a0"), trace("a1", reward=None, error_class="timeout")], [])
    made.step([trace("b0"), trace("b1")], [], step=1)
    chart = charts(told(StoreReader.at(tmp_path), RUN).values)["Outcomes"]
    found = {each["name"]: (each["values"], each["measure"], each["kind"]) for each in chart["series"]}
    assert found == {
        "errored": ([1.0, 0.0], "accounting/errored/timeout", "bars"),
        "pending": ([1.0, 2.0], "accounting/pending", "bars"),
    }
    assert len({each["colour"] for each in chart["series"]}) == 2


def test_every_line_of_a_chart_leads_to_a_metric_that_is_there(walked: StoreReader) -> None:
    known = set(listed(walked))
    named = {one.get("measure") for each in charts(told(walked, RUN).values).values() for one in each["series"]} - {
        None
    }
    assert len(named) > 20 and named <= known
