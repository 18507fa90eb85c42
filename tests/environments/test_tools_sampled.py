"""The environments of several turns with a real engine and real environment servers: what reaches the tables."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import alphabet_sort.demonstrations as names
import calc_tools.demonstrations as sums
import pytest
import wikispeedia.demonstrations as walks
from calc_tools.sums import Chain, calculated, is_right, progress
from calc_tools.words import words as calc_words
from wikispeedia.graph import graph, page
from wikispeedia.walk import efficiency
from wikispeedia.words import words as walk_words

from configs.load import load
from configs.run import View
from tasks.inference.engine.client import Engine
from tasks.learner.tiny import tiny_qwen3
from tasks.rollout import stage as rollout
from tests.environments.scripted import listed
from tests.fixtures.hosts import ENGINE, engine_of
from tests.fixtures.sampled import sampled_tables
from tests.fixtures.warming import taught

pytestmark = pytest.mark.engine

Row = dict[str, Any]
ROWS, GROUPS, SIZE = 320, 2, 6
"""Conversations of each environment that the model is taught, and how many of them it makes."""
TOPICS = graph(16, 0)


def warmed(directory: Path) -> Path:
    """A model that knows what replies look like in all three."""
    words = list(dict.fromkeys([*calc_words(), *walk_words(TOPICS), *names.words(26)]))
    tiny_qwen3(directory, hidden=96, layers=2, heads=3, kv_heads=3, words=words)
    lists = names.demonstrations(ROWS, seed=1, min_words=1, max_words=2, num_names=26)
    each = zip(sums.demonstrations(ROWS, seed=1), walks.demonstrations(ROWS, TOPICS, seed=1), lists, strict=True)
    rows = [row for together in each for row in together]
    conversations = [(row["messages"], *([json.loads(row["tools"])] if "tools" in row else [])) for row in rows]
    return taught(directory, {"enable_thinking": False}, conversations)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    """An engine that serves the model."""
    root = tmp_path_factory.mktemp("tools")
    weights = warmed(root / "model")
    with engine_of(weights, root / "engine.json") as engine:
        engine.serve("policy-of-tools", weights)
        yield engine, weights


Talk = tuple[Row, list[Row], dict[str, Any]]
"""A trace, its messages in order, and the content of its task."""


def talks(preset: str, policy: tuple[Engine, Path], directory: Path) -> list[Talk]:
    """Sample some groups as a preset says; what no rollout of ours may be is refused here."""
    engine, weights = policy
    given = load([preset])
    model = given.model.model_copy(update={"path": str(weights), "vocab_size": 512})
    config = given.model_copy(update={"engine": ENGINE, "model": model})
    (environment,) = config.environments
    examples = listed(environment)
    view = View(config, rollout.STAGE.sections, rollout.STAGE.name)
    made = sampled_tables(engine, environment, view, examples, directory, (GROUPS, SIZE), "policy-of-tools")
    contents = dict(zip(examples["example_id"].to_pylist(), map(json.loads, examples["task"].to_pylist()), strict=True))
    traces, messages = made["traces"].to_pylist(), made["messages"].to_pylist()
    assert len(traces) == GROUPS * SIZE
    assert not [row["error_message"] for row in traces if row["error_class"]]
    assert {row["num_branches"] for row in traces} == {1}
    for row in messages:
        assert any(row["mask"]) == row["sampled"] == (row["role"] == "assistant")
    return [
        (
            trace,
            sorted(
                (row for row in messages if row["trace_id"] == trace["trace_id"]), key=lambda row: int(row["message"])
            ),
            contents[trace["example_id"]],
        )
        for trace in traces
    ]


def calls(messages: list[Row], tool: str, argument: str) -> list[str]:
    """What a tool was asked; the engine writes calls as text, and the record holds them apart."""
    made = [call for row in messages for call in json.loads(row["body"]).get("tool_calls") or []]
    return [str(json.loads(call["arguments"]).get(argument, "")) for call in made if call["name"] == tool]


def results(messages: list[Row]) -> list[str]:
    """What the tools answered."""
    return [row["content"] for row in messages if row["role"] == "tool"]


def test_a_calculation_is_calls_results_and_an_answer(policy: tuple[Engine, Path], tmp_path: Path) -> None:
    found = talks("calc_tools", policy, tmp_path)
    num_results = 0
    for trace, messages, task in found:
        chain = Chain(task["first"], tuple(task["operations"]))
        asked, told = calls(messages, "calc", "expression"), results(messages)
        assert told == [calculated(each) for each in asked][: len(told)]
        right = is_right(messages[-1]["content"] or "", chain.results[-1])
        assert trace["reward"] == pytest.approx(0.5 * right + 0.5 * progress(asked, chain.calls) / 2)
        assert json.loads(trace["metrics"])["num_calls"] == len(asked)
        num_results += len(told)
    assert num_results > 0, "the model has not called the tool once"


def test_a_walk_leads_from_page_to_page(policy: tuple[Engine, Path], tmp_path: Path) -> None:
    found = talks("wikispeedia", policy, tmp_path)
    num_moves = 0
    for trace, messages, task in found:
        trail = json.loads(trace["info"])["trail"]
        assert trail[0] == task["start"]
        for number, (before, after) in enumerate(pairwise(trail)):
            assert after in TOPICS[before] or after in trail[:number], "neither a link nor gone back"
        shown = [text for text in results(messages) if not text.startswith("no")]
        assert shown == [page(TOPICS, topic) for topic in trail[1 : len(shown) + 1]]
        score = efficiency(trail, task["target"], task["distance"])
        assert trace["reward"] == pytest.approx(0.5 * (score > 0) + 0.5 * score)
        num_moves += len(trail) - 1
    assert num_moves > 0, "the model has not followed one link"


def test_a_list_is_sorted_in_turns(policy: tuple[Engine, Path], tmp_path: Path) -> None:
    from alphabet_sort.lists import asked, score

    found = talks("alphabet_sort", policy, tmp_path)
    for trace, messages, task in found:
        said = [row["content"] or "" for row in messages if row["role"] == "assistant"]
        turns = task["turns"]
        expected = [asked(given, "sorted", first=not number) for number, given in enumerate(turns)]
        assert [row["content"] for row in messages if row["role"] == "user"] == expected
        assert trace["num_turns"] == len(said) == len(turns)
        answers = [sorted(name for given in turns[: number + 1] for name in given) for number in range(len(turns))]
        assert trace["reward"] == pytest.approx(score([text.strip() for text in said], answers, "sorted", 1.0))
    assert any(trace["reward"] > 0 for trace, _, _ in found), "the model has not used the tags once"
