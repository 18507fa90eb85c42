"""Two runs on pages: the values of the command, the same step of both, and their attempts at an example."""

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from configs.run import View
from flows.queries.compare import compare, compared_evaluations, compared_steps
from flows.queries.compare_rows import compared_attempts, compared_groups, compared_traces
from flows.queries.compare_summary import sentences
from flows.queries.request import NotThere, PageRequest
from flows.queries.run_state import any_going
from flows.queries.store_reader import StoreReader
from flows.viewer import addresses
from flows.viewer.addresses import Page
from flows.viewer.pages.compare import ledger_cells
from flows.viewer.rendering import as_html
from storage.maintenance.sweep import Retention, expire
from storage.store import open_store
from tasks.runtime.stage import Policy, Tables
from tests.fixtures.evaluations import HELD_OUT, Sampler, train
from tests.fixtures.rehearsal import rehearse
from tests.flows.viewer import compared_runs, looking
from tests.flows.viewer.compared_runs import with_column

pytestmark = pytest.mark.engine  # ten runs are walked, a third of a second each
SUMMARIES = {
    ("base", "twin"): "The same work: all 14 results have the same keys, so their rows are equal.",
    ("base", "credited"): "They differ from step 0, stage advantage on: another key. Shared results: 7.",
    ("base", "seeded"): "They differ from step 0, stage assignment on: another key. Shared results: 2.",
    ("base", "longer"): "The same work as far as both go: 14 results have the same keys.",
    ("base", "broken"): "They differ from step 0, stage training on: another key. Shared results: 8.",
    ("first", "later"): "No step is in both. Results with the same keys: 1.",
    ("base", "base"): "This is the same run on both sides.",
}


def answer(library: StoreReader, a: str, b: str, **query: str) -> tuple[int, str]:
    return looking.answer(library, addresses.compare(a, b), **query)


@pytest.mark.parametrize(("pair", "sentence"), SUMMARIES.items(), ids=str)
def test_the_page_has_the_values_of_the_command_and_says_where_the_runs_part(
    ten_runs: StoreReader, pair: tuple[str, str], sentence: str
) -> None:
    comparison = json.loads(json.dumps(compare(ten_runs, *pair)))
    values = looking.values(ten_runs, addresses.compare(*pair))
    comparison["config"].sort(key=lambda setting: not setting["in_keys"])
    assert {name: values[name] for name in comparison} == comparison
    assert values["summary"][0] == sentence and all(line in answer(ten_runs, *pair)[1] for line in values["summary"])


def test_runs_of_unlike_lengths_say_which_steps_one_has_alone(ten_runs: StoreReader) -> None:
    assert sentences(compare(ten_runs, "base", "longer"))[1] == "Only in b: step 2."
    rows = compared_steps(ten_runs, "base", "longer")
    assert rows.select("step", "only", "first_difference", "loss_a", "loss_b", "loss_difference").rows() == [
        (0, None, None, 0.0, 0.0, 0.0),
        (1, None, None, 0.1, 0.1, 0.0),
        (2, "only in b", "assignment", None, 0.2, None),
    ]


def test_the_ledger_of_both_is_one_picture_of_states(ten_runs: StoreReader) -> None:
    drawn = ledger_cells(compare(ten_runs, "base", "credited")["pieces"])
    assert drawn["steps"] == [0, 1]
    assert {row["stage"]: row["states"] for row in drawn["rows"]} == {
        "policy_import": ["only in a", None],
        "examples": ["same key", None],
        **dict.fromkeys(("assignment", "rollout", "filtering"), ["same key"] * 2),
        **dict.fromkeys(("advantage", "packing"), ["different key"] * 2),
        "training": ["only in a"] * 2,
    }
    assert drawn["counts"] == {"same key": 7, "different key": 4, "only in a": 3, "only in b": 0}


def test_a_run_that_failed_in_the_middle_has_no_figures_of_its_unfinished_step(ten_runs: StoreReader) -> None:
    rows = compared_steps(ten_runs, "base", "broken")
    assert rows["loss_b"].to_list() == [0.0, None] and rows["weights_equal"].to_list() == [False, None]
    assert not any_going(ten_runs, "base", "broken") and "failed" in answer(ten_runs, "base", "broken")[1]


def test_a_figure_is_chosen_and_what_is_not_known_is_refused(ten_runs: StoreReader) -> None:
    status, html = answer(ten_runs, "base", "credited", figure="fill")
    assert status == 200 and '<option value="fill" selected>' in html
    assert answer(ten_runs, "base", "credited", figure="luck")[0] == 400
    status, text = answer(ten_runs, "base", "nobody")
    assert status == 404 and "nobody" in text


def test_a_comparison_is_made_once_for_the_same_work(tmp_path: Path) -> None:
    store = rehearse(tmp_path / "store", "base", steps=1)
    library = StoreReader.at(tmp_path / "store")
    first = compare(library, "base", "base")
    assert compare(library, "base", "base") is first
    rehearse(tmp_path / "store", "base", steps=2)
    second = compare(library, "base", "base")
    assert len(first["steps"]) == 1 and len(second["steps"]) == 2
    assert library.cache.peek(("compared", "base", "base"))[1] is second
    assert [entry.step for entry in store.ledger.entries(run="base", stage="training")] == [0, 1]


def test_a_run_that_has_only_begun_is_compared_live_and_has_nothing_yet(tmp_path: Path) -> None:
    store = rehearse(tmp_path / "store", "base", steps=1)
    store.runs.record(run="begun", event="started", kind="train", config=store.runs.config("base"))
    library = StoreReader.at(tmp_path / "store")
    status, html = answer(library, "base", "begun")
    assert status == 200 and "They have nothing in common" in html and "data-live-state" in html
    assert compared_steps(library, "base", "begun")["only"].to_list() == ["only in a"]
    store.runs.record(run="begun", event="finished")
    assert "data-live-state" not in answer(library, "base", "begun")[1]
    neither = answer(library, "begun", "begun")[1]
    assert "Neither run has finished any work." in neither and "Neither run has a step yet." in neither


def test_a_step_that_is_there_for_its_examples_alone_is_not_in_both(ten_runs: StoreReader) -> None:
    """A replay of later steps has the examples of step 0, and no step 0."""
    assert sentences(compare(ten_runs, "base", "later")) == [
        "They differ from step 1, stage advantage on: another key. Shared results: 4.",
        "Only in a: step 0.",
    ]
    assert '<a href="/compare/base/later/steps/1">Look at step 1</a>' in answer(ten_runs, "base", "later")[1]


# One step of both runs.
def step_values(library: StoreReader, a: str, b: str, step: int) -> dict[str, Any]:
    return looking.values(library, addresses.compare_step(a, b, step))


def test_a_replay_from_the_advantage_has_the_same_rollouts_credited_otherwise(ten_runs: StoreReader) -> None:
    traces = compared_traces(ten_runs, "base", "credited", 0)
    assert traces["side"].to_list() == ["both"] * 12 and traces["key_a"].equals(traces["key_b"].rename("key_a"))
    # RLOO leaves the rollout itself out of the mean: with four in a group that is 4/3 of the distance to the mean.
    for row in traces.iter_rows(named=True):
        assert row["advantage_b"] == pytest.approx(4 / 3 * row["advantage_a"])
    groups = compared_groups(ten_runs, "base", "credited", 0)
    moved = (pl.col("advantage_b") - pl.col("advantage_a")).abs().max()
    largest = traces.group_by("group_id_a", maintain_order=True).agg(moved)
    assert groups.select("group_a", "max_advantage_difference").rows() == largest.rows()
    assert groups["difference"].to_list() == [0.0] * 3 and groups["num_shared"].to_list() == [4] * 3


def test_groups_of_another_seed_are_paired_by_their_example_alone(ten_runs: StoreReader) -> None:
    traces = compared_traces(ten_runs, "base", "seeded", 0)
    assert set(traces["side"]) == {"a", "b"} and traces.height == 24
    groups = compared_groups(ten_runs, "base", "seeded", 0)
    for row in groups.iter_rows(named=True):
        rows = traces.filter(example_id=row["example_id"])
        for side in "ab":
            rewards = rows.filter(pl.col("side") == side)[f"reward_{side}"]
            mean = rewards.mean()
            assert row[f"num_{side}"] == len(rewards)
            assert row[f"reward_{side}"] == (None if mean is None else pytest.approx(mean))
    one, other = (set(traces.filter(pl.col("side") == side)["example_id"]) for side in "ab")
    assert groups.height == len(one | other) and groups.filter(pl.col("group_a").is_null()).height == len(other - one)
    lone = groups.filter(pl.col("num_b") == 0)
    assert set(lone["difference"]) <= {None} and set(lone["max_advantage_difference"]) <= {None}


def test_a_step_that_only_one_has_stands_alone(ten_runs: StoreReader) -> None:
    values = step_values(ten_runs, "base", "longer", 2)
    assert values["work"]["only"] == "only in b" and values["in_run"] == {"a": False, "b": True}
    assert values["rollouts"] == {"both": 0, "a": 0, "b": 12}
    assert [(row["num_a"], row["reward_a"], row["num_b"]) for row in values["groups"]] == [(0, None, 4)] * 3
    assert (values["previous"], values["next"]) == (1, None)
    with pytest.raises(NotThere, match="neither 'base' nor 'longer' has step 7; the nearest are 2, 1, 0"):
        compared_traces(ten_runs, "base", "longer", 7)
    assert looking.answer(ten_runs, addresses.compare_step("base", "longer", 7))[0] == 404


@pytest.mark.parametrize("pair", [("base", "credited"), ("base", "seeded"), ("base", "broken"), ("base", "strict")])
def test_a_page_of_a_step_leads_to_the_traces_in_both_runs(ten_runs: StoreReader, pair: tuple[str, str]) -> None:
    values = step_values(ten_runs, *pair, 0)
    status, html = looking.answer(ten_runs, addresses.compare_step(*pair, 0))
    differing = [row["trace_id"] for row in values["detail"]["verdicts"]]
    differing += [row["sample_id"].rpartition("/")[0] for row in values["detail"]["samples"]]
    assert status == 200 and len(differing) == {"credited": 10, "strict": 4}.get(pair[1], 0)
    for trace in differing:
        for run, key in zip(pair, (values["keys"][trace]["key_a"], values["keys"][trace]["key_b"]), strict=True):
            assert f'href="/runs/{run}/traces/{trace}?key={key}"' in html


def test_samples_that_outlive_their_rollouts_stand_without_links(ten_runs: StoreReader, tmp_path: Path) -> None:
    shutil.copytree(ten_runs.store.root.address, tmp_path / "store")
    expire(open_store(tmp_path / "store"), Retention("traces", 0))
    library = StoreReader.at(tmp_path / "store")
    status, page = looking.answer(library, addresses.compare_step("base", "credited", 0))
    assert status == 200 and "All shared rollouts have the same verdict" not in page and "the same in b" not in page


def test_agents_of_an_episode_are_compared_each_with_its_like(tmp_path: Path) -> None:
    """What one wins the other loses: over all agents every mean would be zero."""

    def opposed(tables: Tables, config: View, *, step: int, policy: Policy) -> Tables:
        made = compared_runs.sampled(tables, config, step=step, policy=policy)
        traces = made["traces"]
        won = [float(number % 2) * 2 - 1 for number in range(traces.num_rows)]
        agents = ["first" if reward > 0 else "second" for reward in won]
        return made | {"traces": with_column(with_column(traces, "reward", won), "agent", agents)}

    with compared_runs.played(rollout=opposed):
        for name, seed in (("one", 7), ("other", 8)):
            rehearse(tmp_path / "store", name, steps=1, seed=seed, algorithm={"type": "rae"})
    groups = compared_groups(StoreReader.at(tmp_path / "store"), "one", "other", 0)
    rows = groups.filter(pl.col("num_a") > 0).sort("group_a", "agent")
    assert rows.select("agent", "num_a", "reward_a").rows() == [("first", 2, 1.0), ("second", 2, -1.0)] * 3
    assert set(groups.drop_nulls("difference")["difference"]) <= {0.0}
    assert rows["group_a"].to_list() == ["0-0"] * 2 + ["0-1"] * 2 + ["0-2"] * 2


# Attempts at an example.
@pytest.fixture(scope="module")
def example(ten_runs: StoreReader) -> tuple[str, str]:
    """An example that the longer run tried more than once, and the base run too."""
    rows = ten_runs.frames("longer")["assignments"].select("step", "environment", "example_id").unique().collect()
    own = ten_runs.frames("base")["assignments"].select("example_id").collect()["example_id"]
    often = rows.filter(pl.col("example_id").is_in(own.implode())).group_by("environment", "example_id").len()
    environment, name, _ = often.sort("len", "example_id", descending=[True, False]).row(0)
    return environment, name


def example_values(library: StoreReader, a: str, b: str, example: tuple[str, str], **query: str) -> dict[str, Any]:
    return looking.values(library, addresses.compare_example(a, b, *example), **query)


def test_attempts_are_those_of_both_runs_in_order(ten_runs: StoreReader, example: tuple[str, str]) -> None:
    rows = compared_attempts(ten_runs, "base", "longer", *example)
    for side, run in (("a", "base"), ("b", "longer")):
        traces = ten_runs.frames(run)["traces"].filter(pl.col("example_id") == example[1]).collect()
        own = rows.filter(pl.col("side") == side)
        assert sorted(own["trace_id"]) == sorted(traces["trace_id"]) and set(own["run"]) == {run}
        assert own["step"].is_sorted() and own["for_training"].all()
    both = set(rows.filter(side="a")["trace_id"]) & set(rows.filter(side="b")["trace_id"])
    assert set(rows.filter("in_both")["trace_id"]) == both != set()


def test_without_a_choice_the_last_attempts_stand_beside_each_other(
    ten_runs: StoreReader, example: tuple[str, str]
) -> None:
    values = example_values(ten_runs, "base", "longer", example)
    for side in "ab":
        last = values[f"of_{side}"]["moments"][-1]
        attempts = values[f"of_{side}"]["attempts"]
        assert values[f"of_{side}"]["shown"] == last and {row["step"] for row in attempts} == {last["step"]}
        assert last["reward"] == pytest.approx(sum(row["reward"] for row in attempts) / last["num_attempts"])
        assert values[f"chosen_{side}"] in attempts
    itself = example_values(ten_runs, "longer", "longer", example)
    steps = [moment["step"] for moment in itself["of_a"]["moments"]]
    assert (itself["of_a"]["shown"]["step"], itself["of_b"]["shown"]["step"]) == (steps[0], steps[-1])


def test_the_same_rollout_is_chosen_and_a_prompt_stands_once_over_both(ten_runs: StoreReader) -> None:
    (trace,) = ten_runs.frames("base")["traces"].filter(pl.col("step") == 0).head(1).collect().to_dicts()
    example = trace["environment"], trace["example_id"]
    values = example_values(ten_runs, "base", "credited", example, step_a="0", step_b="0")
    assert values["chosen_a"]["trace_id"] == values["chosen_b"]["trace_id"]
    assert [each["role"] for each in values["shared"]] == ["user"] and not values["shared"][0]["sampled"]
    assert values["said_a"] == values["said_b"] and values["said_a"][0]["sampled"]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"step_a": "0", "version_a": "0"}, 400),
        ({"step_a": "one"}, 400),
        ({"trace_a": "no-such-trace"}, 404),
        ({"step_b": "99"}, 200),
        ({"version_a": "0"}, 200),
    ],
)
def test_what_cannot_be_chosen_is_refused_or_empty(
    ten_runs: StoreReader, example: tuple[str, str], query: dict[str, str], status: int
) -> None:
    found, html = looking.answer(ten_runs, addresses.compare_example("base", "longer", *example), **query)
    assert found == status
    assert status != 200 or "No attempts then." in html


def test_an_example_that_neither_tried_is_not_there_and_the_nearest_are_named(ten_runs: StoreReader) -> None:
    rows = ten_runs.frames("base")["assignments"].select("environment", "example_id").collect()
    environment, known = rows.row(0)
    with pytest.raises(NotThere, match=rf"neither 'base' nor 'twin'.*the nearest examples are .*{environment}/example"):
        compared_attempts(ten_runs, "base", "twin", environment, known + "0000")
    assert looking.answer(ten_runs, addresses.compare_example("base", "twin", "", ""))[0] == 400


def test_hostile_texts_stand_on_the_page_as_texts() -> None:
    nothing: dict[str, Any] = {"moments": [], "shown": None, "attempts": [], "reward": None}
    one = {"trace_id": "t", "key": "k", "reward": None}
    said = {"role": "<b>", "sampled": True, "text": "<script>a</script>\x1b[31m\u202e", "left_out": 5}
    values = {"agents": ["x"], "agent": "x", "a": "x", "b": "y", "shared": [said]}
    values |= {f"{name}_{side}": value for side in "ab" for name, value in (("of", nothing), ("chosen", one))}
    page = Page("compare_example.html", "t", values | {"said_a": [said], "said_b": []})
    html = as_html(page, PageRequest("/compare/x/y/example")).decode().partition("What they said")[2]
    assert html.count("&lt;script&gt;a") == 2 and "5 more characters" in html
    assert "<script>a" not in html and "<b>" not in html.partition("</main>")[0].replace("reward <b>", "")
    assert "\x1b" not in html and "\u202e" not in html


# Evaluations: whole runs, about a second each.
@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    """Two runs: the second has a step and a policy more, and one rollout of its evaluations failed."""
    root, settings = tmp_path_factory.mktemp("evaluated") / "store", {"attempts": 2, "every": 1}
    settings["num_examples"] = HELD_OUT
    train(root, "one", Sampler(), steps=1, evaluation=settings)
    train(root, "two", Sampler(frozenset({"eval-reverse_text-0/0"})), seed=8, evaluation=settings)
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


def test_a_run_beside_itself_is_the_same_work(evaluated: StoreReader) -> None:
    itself = compared_evaluations(evaluated, "one", "one")
    assert itself["same_work"].all() and set(itself["difference"]) == {0.0} and set(itself["low"]) == {None}


def test_held_out_attempts_of_two_versions_stand_beside_each_other(evaluated: StoreReader) -> None:
    rows = compared_attempts(evaluated, "two", "two", "reverse_text", "held-1")
    assert set(rows["for_training"]) == {False} and rows.filter(side="a")["step"].to_list() == [0, 0, 1, 1, 2, 2]
    beside = addresses.compare_example("two", "two", "reverse_text", "held-1", version_a="0", version_b="2")
    _, html = looking.answer(evaluated, beside)
    assert "held out, policy 0" in html and "held out, policy 2" in html and "version_a=0" in html
