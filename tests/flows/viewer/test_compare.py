"""Two runs side by side: the same values as the command's, and the pages that show them; evaluations in pairs."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from flows.queries.compare import FIGURES, compare, compare_cached, compared_evaluations, compared_steps
from flows.queries.compare_summary import ledger_cells, replayed_settings, summary_sentences
from flows.queries.compare_traces import compared_attempts
from flows.queries.request import NotThere
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from storage.read.frames import existing_store
from tests.fixtures.evaluations import HELD_OUT, Sampler, train
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer import looking

pytestmark = pytest.mark.engine  # ten runs are walked, a third of a second each
PAIRS = [
    ("base", "twin"),
    ("base", "credited"),
    ("credited", "base"),
    ("base", "seeded"),
    ("base", "longer"),
    ("base", "broken"),
    ("first", "later"),
    ("strict", "faster"),
    ("base", "base"),
]


def answer(library: StoreReader, a: str, b: str, **query: str) -> tuple[int, str]:
    return looking.answer(library, addresses.compare(a, b), **query)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_what_the_page_says_is_what_the_command_says_to_the_last_bit(ten_runs: StoreReader, a: str, b: str) -> None:
    expected = json.loads(json.dumps(compare(StoreReader(existing_store(ten_runs.store.root.address)), a, b)))
    assert json.loads(json.dumps(compare_cached(ten_runs, a, b))) == expected
    status, text = answer(ten_runs, a, b, format="json")
    said = json.loads(text)
    assert status == 200
    for name in ("runs", "pieces", "same_work", "together", "weights_part_at", "evaluations"):
        assert said[name] == expected[name], name
    assert sorted(said["config"], key=str) == sorted(expected["config"], key=str)
    kept = ("a", "b", "between", "step")
    assert [{name: step[name] for name in kept} for step in said["steps"]] == [
        {name: step[name] for name in kept} for step in expected["steps"]
    ]
    status, html = answer(ten_runs, a, b)
    assert status == 200 and all(sentence in html for sentence in said["summary"])


SAID = {
    ("base", "twin"): "The same work: all 14 results have the same keys, so their rows are equal.",
    ("base", "credited"): "They differ from step 0, stage advantage on: another key. Shared results: 7.",
    ("base", "seeded"): "They differ from step 0, stage assignment on: another key. Shared results: 2.",
    ("base", "longer"): "The same work as far as both go: 14 results have the same keys.",
    ("base", "broken"): "They differ from step 0, stage training on: another key. Shared results: 8.",
    ("first", "later"): "No step is in both. Results with the same keys: 1.",
    ("base", "base"): "This is the same run on both sides.",
}


@pytest.mark.parametrize(("pair", "sentence"), SAID.items(), ids=str)
def test_where_two_runs_part_is_said_in_a_sentence(ten_runs: StoreReader, pair: tuple[str, str], sentence: str) -> None:
    assert summary_sentences(compare_cached(ten_runs, *pair))[0] == sentence


def test_runs_of_unlike_lengths_say_which_steps_one_has_alone(ten_runs: StoreReader) -> None:
    assert summary_sentences(compare_cached(ten_runs, "base", "longer"))[1] == "Only in b: step 2."
    rows = compared_steps(ten_runs, "base", "longer").select("step", "only", "first_difference", "loss_a", "loss_b")
    assert rows.rows() == [
        (0, None, None, 0.0, 0.0),
        (1, None, None, 0.1, 0.1),
        (2, "only in b", "assignment", None, 0.2),
    ]


def test_a_replay_beside_its_source_is_told_first_with_what_it_changed(ten_runs: StoreReader) -> None:
    changed = [each for each in compare_cached(ten_runs, "base", "credited")["config"] if each["in_keys"]]
    (told_of,) = replayed_settings(ten_runs, "base", "credited", changed)
    assert told_of == {
        **{"side": "b", "run": "credited", "of": "base", "beside_source": True},
        **{"from_stage": "advantage", "until": "packing", "stages": ["advantage", "packing"]},
        **{"first_step": 0, "last_step": 1, "policies": None, "regraded": False, "changed": changed},
    }
    assert ("algorithm.type", "grpo", "rloo") in [(each["key"], each["a"], each["b"]) for each in changed]
    (turned,) = replayed_settings(ten_runs, "credited", "base", changed)
    assert turned["side"] == "a"
    both = replayed_settings(ten_runs, "first", "later", changed)
    assert [(each["side"], each["beside_source"], each["changed"]) for each in both] == [
        ("a", False, []),
        ("b", False, []),
    ]
    _, html = answer(ten_runs, "credited", "base")
    assert html.index("is a replay of") < html.index("They differ from") and "&#34;grpo&#34; → &#34;rloo&#34;" in html


def test_the_ledger_of_both_is_one_picture_of_states(ten_runs: StoreReader) -> None:
    drawn = ledger_cells(compare_cached(ten_runs, "base", "credited")["pieces"])
    assert drawn["steps"] == [0, 1]
    assert {row["stage"]: row["states"] for row in drawn["rows"]} == {
        "policy_import": ["only in a", None],
        "examples": ["same key", None],
        "assignment": ["same key", "same key"],
        "rollout": ["same key", "same key"],
        "filtering": ["same key", "same key"],
        "advantage": ["different key", "different key"],
        "packing": ["different key", "different key"],
        "training": ["only in a", "only in a"],
    }
    assert drawn["counts"] == {"same key": 7, "different key": 4, "only in a": 3, "only in b": 0}


def test_a_run_that_failed_in_the_middle_has_no_figures_of_what_it_did_not_do(ten_runs: StoreReader) -> None:
    rows = compared_steps(ten_runs, "base", "broken")
    assert rows["loss_b"].to_list() == [0.0, None] and rows["loss_difference"].to_list() == [0.0, None]
    assert rows["weights_equal"].to_list() == [False, None]
    assert not any_going(ten_runs, "base", "broken")
    assert "failed" in answer(ten_runs, "base", "broken")[1]


def test_steps_as_a_frame_hold_both_figures_and_their_difference(ten_runs: StoreReader) -> None:
    rows = compared_steps(ten_runs, "strict", "faster")
    assert rows.columns[:3] == ["step", "first_difference", "only"]
    assert [name for name in rows.columns if name.endswith("_difference")][:20] == [
        "first_difference",
        *(f"{name}_difference" for name in FIGURES[:19]),
    ]
    first = rows.row(0, named=True)
    assert first["first_difference"] == "filtering" and first["num_shared_traces"] == 12
    assert first["num_kept_difference"] == first["num_kept_b"] - first["num_kept_a"] > 0
    assert rows["only"].to_list() == [None, "only in b"]
    assert rows.filter(pl.col("step") == 1)["reward_mean_difference"].to_list() == [None]


def test_a_figure_is_chosen_and_what_is_not_known_is_refused(ten_runs: StoreReader) -> None:
    status, html = answer(ten_runs, "base", "credited", figure="fill")
    assert status == 200 and '<option value="fill" selected>' in html
    assert answer(ten_runs, "base", "credited", figure="luck")[0] == 400
    status, text = answer(ten_runs, "base", "nobody")
    assert status == 404 and "nobody" in text
    with pytest.raises(NotThere, match="nobody"):
        compare_cached(ten_runs, "nobody", "base")


def test_a_comparison_is_made_once_for_the_same_work(ten_runs: StoreReader) -> None:
    first: Any = compare_cached(ten_runs, "base", "longer")
    assert compare_cached(ten_runs, "base", "longer") is first
    assert compare_cached(ten_runs, "longer", "base") is not first


def test_a_run_that_has_only_begun_is_compared_live_and_has_nothing_yet(tmp_path: Path) -> None:
    store = rehearse(tmp_path / "store", "base", steps=1)
    config = store.runs.config("base")
    store.runs.record(run="begun", event="started", kind="train", config=config)
    library = StoreReader.at(tmp_path / "store")
    assert any_going(library, "base", "begun") and not any_going(library, "base")
    status, html = answer(library, "base", "begun")
    assert status == 200 and "They have nothing in common" in html and "data-live-state" in html
    assert compared_steps(library, "base", "begun")["only"].to_list() == ["only in a"]
    store.runs.record(run="begun", event="finished")
    assert "data-live-state" not in answer(library, "base", "begun")[1]
    neither = answer(library, "begun", "begun")[1]
    assert "Neither run has finished any work." in neither and "Neither run has a step yet." in neither


def test_a_step_that_is_there_for_its_examples_alone_is_not_in_both(ten_runs: StoreReader) -> None:
    """A replay of later steps has the examples of step 0, and no step 0."""
    assert summary_sentences(compare_cached(ten_runs, "base", "later")) == [
        "They differ from step 1, stage advantage on: another key. Shared results: 4.",
        "Only in a: step 0.",
    ]
    said = json.loads(answer(ten_runs, "base", "later", format="json")[1])
    assert said["parts_at"] == 1
    assert '<a href="/compare/base/later/steps/1">Look at step 1</a>' in answer(ten_runs, "base", "later")[1]
    assert [step["only"] for step in said["steps"]] == ["only in a", None]


def test_what_a_run_had_before_it_did_more_is_let_go(tmp_path: Path) -> None:
    store = rehearse(tmp_path / "store", "base", steps=1)
    library = StoreReader.at(tmp_path / "store")
    first = compare_cached(library, "base", "base")
    rehearse(tmp_path / "store", "base", steps=2)
    second = compare_cached(library, "base", "base")
    assert len(first["steps"]) == 1 and len(second["steps"]) == 2
    assert library.cache.peek(("compared", "base", "base"))[1] is second
    assert [entry.step for entry in store.ledger.entries(run="base", stage="training")] == [0, 1]


# whole runs: about a second each
SETTINGS = {"num_examples": HELD_OUT, "attempts": 2, "every": 1}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    """Two runs: the second has a step and a policy more, and one rollout of its evaluations failed."""
    root = tmp_path_factory.mktemp("evaluated") / "store"
    failing = frozenset({"eval-reverse_text-0/0"})
    train(root, "one", Sampler(), steps=1, evaluation=SETTINGS)
    train(root, "two", Sampler(failing), seed=8, evaluation=SETTINGS)
    return StoreReader.at(root)


def test_policies_of_a_version_are_paired_and_the_last_ones_too(evaluated: StoreReader) -> None:
    rows = compared_evaluations(evaluated, "one", "two").filter(figure="avg")
    assert [(row["version_a"], row["version_b"]) for row in rows.to_dicts()] == [(0, 0), (1, 1), (1, 2)]
    # Each later policy earns a tenth more on every example; where a rollout failed, the other one is left.
    assert rows["difference"].to_list() == pytest.approx([0.0, 0.0, 0.1], abs=0.005)
    last = rows.row(2, named=True)
    assert last["low"] < 0.1 < last["high"] and last["high"] - last["low"] < 0.02
    assert last["num_examples"] == HELD_OUT and last["a"] == pytest.approx(0.23, abs=0.005)
    assert not rows["same_work"].any()


def test_averages_are_those_of_the_command_and_a_run_beside_itself_is_the_same_work(evaluated: StoreReader) -> None:
    averages = compare_cached(evaluated, "one", "two")["evaluations"]
    assert [(row["version"], row["a"] is None, row["b"] is None) for row in averages] == [
        (0, False, False),
        (1, False, False),
        (2, True, False),
    ]
    itself = compared_evaluations(evaluated, "one", "one")
    assert itself["same_work"].all() and set(itself["difference"]) == {0.0} and set(itself["low"]) == {None}


def test_held_out_attempts_of_two_versions_stand_beside_each_other(evaluated: StoreReader) -> None:
    rows = compared_attempts(evaluated, "two", "two", "reverse_text", "held-1")
    assert set(rows["for_training"]) == {False} and rows.filter(side="a")["step"].to_list() == [0, 0, 1, 1, 2, 2]
    beside = addresses.compare_example("two", "two", "reverse_text", "held-1", version_a="0", version_b="2")
    _, html = looking.answer(evaluated, beside)
    assert "held out, policy 0" in html and "held out, policy 2" in html and "version_a=0" in html
