"""Two policies on the same example: which attempts stand beside each other, and what of them is told."""

from typing import Any

import polars as pl
import pytest

from flows.queries.compare_traces import (
    changed_measures,
    compared_attempts,
    compared_tokens,
    moments,
    side_by_side,
    typical,
)
from flows.queries.request import NotThere, PageRequest
from flows.queries.store_reader import StoreReader
from flows.queries.trace import find_trace
from flows.viewer import addresses
from flows.viewer.addresses import Page
from flows.viewer.rendering import as_html
from tests.flows.viewer import looking

pytestmark = pytest.mark.engine  # see test_compare


@pytest.fixture(scope="module")
def example(ten_runs: StoreReader) -> tuple[str, str]:
    """An example that the longer run tried more than once, and the base run too."""
    rows = ten_runs.frames("longer")["assignments"].select("step", "environment", "example_id").unique().collect()
    own = ten_runs.frames("base")["assignments"].select("example_id").collect()["example_id"]
    often = rows.filter(pl.col("example_id").is_in(own.implode())).group_by("environment", "example_id").len()
    environment, name, _ = often.sort("len", "example_id", descending=[True, False]).row(0)
    return environment, name


def answer(library: StoreReader, a: str, b: str, example: tuple[str, str], **query: str) -> tuple[int, str]:
    return looking.answer(library, addresses.compare_example(a, b, *example), **query)


def values(library: StoreReader, a: str, b: str, example: tuple[str, str], **query: str) -> dict[str, Any]:
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
    means = {(row["side"], row["step"]): row["reward"] for row in moments(rows).to_dicts()}
    for (side, step), mean in means.items():
        assert mean == pytest.approx(rows.filter(side=side, step=step)["reward"].mean())


def test_the_attempt_that_is_shown_is_a_typical_one(ten_runs: StoreReader) -> None:
    rows = pl.DataFrame({"trace_id": ["w", "x", "y", "z"], "reward": [None, 0.0, 0.5, 1.0]})
    shown = typical(rows)
    assert shown is not None and shown["trace_id"] == "y"
    unscored = typical(rows.head(1))
    assert unscored is not None and unscored["trace_id"] == "w"
    assert typical(rows.clear()) is None


def test_without_a_choice_the_last_attempts_stand_beside_each_other(
    ten_runs: StoreReader, example: tuple[str, str]
) -> None:
    said = values(ten_runs, "base", "longer", example)
    for side in "ab":
        last = said[f"of_{side}"]["moments"][-1]
        assert said[f"of_{side}"]["shown"]["step"] == last["step"]
        assert {row["step"] for row in said[f"of_{side}"]["attempts"]} == {last["step"]}
        assert said[f"chosen_{side}"]["trace_id"] in [row["trace_id"] for row in said[f"of_{side}"]["attempts"]]


def test_one_run_stands_beside_itself_early_and_late(ten_runs: StoreReader, example: tuple[str, str]) -> None:
    steps = [each["step"] for each in values(ten_runs, "longer", "longer", example)["of_a"]["moments"]]
    said = values(ten_runs, "longer", "longer", example)
    assert (said["of_a"]["shown"]["step"], said["of_b"]["shown"]["step"]) == (steps[0], steps[-1])
    turned = values(ten_runs, "longer", "longer", example, step_a=str(steps[-1]), step_b=str(steps[0]))
    assert turned["of_a"]["attempts"] == [row | {"side": "a"} for row in said["of_b"]["attempts"]]


def test_the_same_rollout_in_a_replay_is_told_token_by_token(ten_runs: StoreReader) -> None:
    (trace,) = ten_runs.frames("base")["traces"].filter(pl.col("step") == 0).head(1).collect().to_dicts()
    example = trace["environment"], trace["example_id"]
    one, other = (find_trace(ten_runs, run, trace["trace_id"]) for run in ("base", "credited"))
    rows = compared_tokens(ten_runs, one, other)
    assert rows.height == trace["num_output_tokens"]
    credits = [
        ten_runs.frames(run)["samples"].filter(pl.col("trace_id") == trace["trace_id"]).collect().row(0, named=True)
        for run in ("base", "credited")
    ]
    for name, column in (("a", 0), ("b", 1)):
        given = [v for v, w in zip(credits[column]["advantages"], credits[column]["rl_weights"], strict=True) if w]
        assert rows[f"advantage_{name}"].to_list() == given
    assert changed_measures(rows) == {
        **{"advantage": rows.height, "rl_weight": 0, "ce_weight": 0, "ref_kl_weight": 0, "signal": 0},
        "trained_rl_weight": rows["trained_rl_weight_a"].count(),  # the replay ended before training
    }
    said = values(ten_runs, "base", "credited", example, step_a="0", step_b="0")
    assert said["chosen_a"]["trace_id"] == said["chosen_b"]["trace_id"] and said["tokens"]["by"] == "advantage"
    levels = {each["level"] for each in said["tokens"]["shown"]}
    assert len(levels) == 1 and levels <= {"n4", "p4"}, "all tokens of a rollout move alike, and the most of all"
    assert answer(ten_runs, "base", "credited", example, step_a="0", step_b="0", by="luck")[0] == 400
    assert values(ten_runs, "base", "strict", example, step_a="0", step_b="0")["tokens"] is not None


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
    found, html = answer(ten_runs, "base", "longer", example, **query)
    assert found == status
    assert status != 200 or "No attempts then." in html


def test_an_example_that_neither_tried_is_not_there_and_the_nearest_are_named(ten_runs: StoreReader) -> None:
    rows = ten_runs.frames("base")["assignments"].select("environment", "example_id").collect()
    environment, known = rows.row(0)
    with pytest.raises(NotThere, match=rf"neither 'base' nor 'twin'.*the nearest examples are .*{environment}/example"):
        compared_attempts(ten_runs, "base", "twin", environment, known + "0000")
    assert answer(ten_runs, "base", "twin", ("", ""))[0] == 400


def test_turns_are_laid_side_by_side_with_what_both_were_given_once() -> None:
    given = [{"role": "user", "text": "2 + 2"}]
    found = side_by_side([(given, "it is 4"), ([{"role": "tool", "text": "ok"}], "yes")], [(given, "it is 5")])
    first, second = found["turns"]
    assert found["num_turns"] == 2 and first["same_given"] and first["given_a"][0]["text"] == "2 + 2"
    assert [piece["text"] for piece in first["said_a"]["pieces"]] == ["it is ", "4"]
    assert [piece["kind"] for piece in first["said_b"]["pieces"]] == ["same", "own"]
    assert second["given_b"] is None and second["said_b"] is None and not second["same_given"]
    assert [piece["text"] for piece in second["said_a"]["pieces"]] == ["yes"]


def test_hostile_texts_stand_on_the_page_as_texts() -> None:
    found = side_by_side([([], "<script>a</script>\x1b[31m")], [([], "<script>b</script>\u202e")])
    nothing: dict[str, Any] = {"moments": [], "shown": None, "attempts": [], "reward": None}
    one = {"trace_id": "t", "key": "k", "reward": None}
    said = {
        "agents": ["x"],
        "agent": "x",
        "a": "x",
        "b": "y",
        "of_a": nothing,
        "of_b": nothing,
        "chosen_a": one,
        "chosen_b": one,
    }
    page = Page("compare_example.html", "t", said | {"tokens": None, "texts": found})
    html = as_html(page, PageRequest("/compare/x/y/example")).decode()
    said_of_a = html.partition('class="halves spoken"')[2]
    assert "<script" not in said_of_a.partition("</main>")[0] and "\x1b" not in html and "\u202e" not in html
    assert "&lt;script&gt;" in said_of_a and '<mark class="own_a">a</mark>' in said_of_a
