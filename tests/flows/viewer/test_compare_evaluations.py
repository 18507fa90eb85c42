"""Evaluations of two runs in the viewer: paired over the same examples, as far as there are any."""

import pytest

from flows.viewer.data.compare import compared, compared_evaluations
from flows.viewer.data.compare_attempts import compared_attempts
from flows.viewer.library import Library
from flows.viewer.page import Asked
from flows.viewer.web.app import page_of, respond
from tests.flows.evaluations import HELD_OUT, Sampler, train

pytestmark = pytest.mark.engine  # whole runs: about a second each
SETTINGS = {"num_examples": HELD_OUT, "attempts": 2, "every": 1}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Two runs: the second has a step and a policy more, and one rollout of its evaluations failed."""
    root = tmp_path_factory.mktemp("evaluated") / "store"
    failing = frozenset({"eval-reverse_text-0/0"})
    train(root, "one", Sampler(), steps=1, evaluation=SETTINGS)
    train(root, "two", Sampler(failing), seed=8, evaluation=SETTINGS)
    return Library.at(root)


def test_policies_of_a_version_are_paired_and_the_last_ones_too(library: Library) -> None:
    rows = compared_evaluations(library, "one", "two").filter(figure="avg")
    assert [(row["version_a"], row["version_b"]) for row in rows.to_dicts()] == [(0, 0), (1, 1), (1, 2)]
    # Each later policy earns a tenth more on every example; where a rollout failed, the other one is left.
    assert rows["difference"].to_list() == pytest.approx([0.0, 0.0, 0.1], abs=0.005)
    last = rows.row(2, named=True)
    assert last["low"] < 0.1 < last["high"] and last["high"] - last["low"] < 0.02
    assert last["num_examples"] == HELD_OUT and last["a"] == pytest.approx(0.23, abs=0.005)
    assert not rows["same_work"].any()


def test_averages_are_those_of_the_command_and_a_run_beside_itself_is_the_same_work(library: Library) -> None:
    averages = compared(library, "one", "two")["evaluations"]
    assert [(row["version"], row["a"] is None, row["b"] is None) for row in averages] == [
        (0, False, False),
        (1, False, False),
        (2, True, False),
    ]
    itself = compared_evaluations(library, "one", "one")
    assert itself["same_work"].all() and set(itself["difference"]) == {0.0} and set(itself["low"]) == {None}


def test_the_page_shows_differences_with_their_intervals(library: Library) -> None:
    asked = Asked("/compare/one/two", {"a": "one", "b": "two"})
    html = bytes(respond(page_of("compare"), library, asked).body).decode()
    assert 'href="/runs/one/evaluations/1">1</a> and <a href="/runs/two/evaluations/2">2</a>' in html


def test_held_out_attempts_of_two_versions_stand_beside_each_other(library: Library) -> None:
    rows = compared_attempts(library, "two", "two", "reverse_text", "held-1")
    assert set(rows["for_training"]) == {False} and rows.filter(side="a")["step"].to_list() == [0, 0, 1, 1, 2, 2]
    query = {"environment": "reverse_text", "id": "held-1", "version_a": "0", "version_b": "2"}
    asked = Asked("/compare/two/two/example", {"a": "two", "b": "two"}, query)
    html = bytes(respond(page_of("compare_example"), library, asked).body).decode()
    assert "held out, policy 0" in html and "held out, policy 2" in html and "version_a=0" in html
