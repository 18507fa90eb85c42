"""Every metric of a run: found by a word, with a curve in the list and a chart at an address of its own."""

import math
from pathlib import Path
from typing import Any

import pytest

from flows.queries.metrics import ABOUT, About, about, ends, matching, metrics, numbers, steps
from flows.queries.request import NotThere, PageRequest
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from flows.viewer.pages.runs import metric_page, run_page
from tests.fixtures.builders import trace
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer.hand_made import RUN, HandMade
from tests.flows.viewer.looking import Elements, visitor

HOSTILE = "../<script>alert(1)</script>\u202e?#%"


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    root = tmp_path_factory.mktemp("metrics") / "store"
    rehearse(root, RUN, steps=2)
    return StoreReader.at(root)


@pytest.fixture
def two(tmp_path: Path) -> StoreReader:
    """Two steps of two environments; the second step has no error."""
    made = HandMade(tmp_path)
    named = f'{{"{HOSTILE}": 3.0}}'
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


def charts(library: StoreReader) -> dict[str, Any]:
    values = run_page(library, PageRequest(addresses.run(RUN), {"run": RUN})).values
    return {each["title"]: each for section in values["sections"] for each in section["charts"]}


def opened(library: StoreReader, name: str) -> Any:
    return metric_page(library, PageRequest(addresses.metric(RUN, name), {"run": RUN, "metric": name})).values


def test_every_number_of_every_step_is_there(two: StoreReader) -> None:
    found = {one["name"]: one["values"] for each in metrics(numbers(two, RUN)) for one in each["series"]}
    recorded = steps(two, RUN).drop("run", "step", "finished")
    assert set(found) == set(recorded.columns)
    for name in recorded.columns:
        told = zip(found[name], recorded[name].to_list(), strict=True)
        assert all(shown == value for shown, value in told if value is not None)


def test_of_one_environment_all_is_told_alone(walked: StoreReader, two: StoreReader) -> None:
    assert {len(each["series"]) for each in listed(walked).values()} == {1}
    assert [one["scope"] for one in listed(two)["num_turns"]["series"]] == ["all", "debate", "sums"]


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
    name = f"metrics/{HOSTILE}"
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
    assert [each["name"] for each in metrics(numbers(walked, RUN)) if not each["told"]] == []
    assert about("timing/stage/rollout") == ABOUT["timing/stage"] and about("timing/model") == ABOUT["timing"]
    assert about("update/entropy").unit == "nats" and "last optimizer step" in about("update/entropy").told
    told = [about(name).told.partition(" ")[0] for name in ("update/mismatch_kl", "update/mismatch_kl_max")]
    assert told == ["mean", "most"]
    assert about("updates/ref_kl_loss/mean").unit == "" and about("nobody/knows") == About("", "")


def test_what_became_of_rollouts_is_stacked_by_outcome_with_zeros(tmp_path: Path) -> None:
    made = HandMade(tmp_path)
    made.step([trace("a0"), trace("a1", reward=None, error_class="timeout")], [])
    made.step([trace("b0"), trace("b1")], [], step=1)
    chart = charts(StoreReader.at(tmp_path))["What became of them"]
    found = {each["name"]: (each["values"], each["measure"], each["kind"]) for each in chart["series"]}
    assert found == {
        "errored": ([1.0, 0.0], "accounting/errored/timeout", "bars"),
        "pending": ([1.0, 2.0], "accounting/pending", "bars"),
    }
    assert len({each["colour"] for each in chart["series"]}) == 2


def test_every_line_of_a_chart_leads_to_a_metric_that_is_there(walked: StoreReader) -> None:
    known = set(listed(walked))
    named = {one.get("measure") for each in charts(walked).values() for one in each["series"]} - {None}
    assert len(named) > 20 and named <= known
