"""Conversations with rewards: messages, prompts and completions, and the results of earlier verifiers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tasks.exchange.files import read_files
from tasks.exchange.trace_import import arrange
from tests.tasks.exchange.lines import READING, read

ASKED = {"role": "user", "content": "2 + 2"}
ANSWERED = {"role": "assistant", "content": "4"}


def rows(path: Path, lines: list[Any]) -> list[dict[str, Any]]:
    """Return the traces of lines that are all good."""
    episodes, problems = read(path, lines)
    assert problems == []
    return arrange(episodes).traces(0).to_pylist()


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [ASKED, ANSWERED], "reward": 1},
        {"prompt": "2 + 2", "completion": "4", "reward": 1.0},
        {"prompt": [ASKED], "completion": [ANSWERED], "reward": 1.0},
    ],
)
def test_forms_of_one_conversation_are_the_same_rollout(line: dict[str, Any], tmp_path: Path) -> None:
    episodes, problems = read(tmp_path / "t.jsonl", [line])
    found = arrange(episodes)
    (trace,), said = found.traces(0).to_pylist(), found.messages(0).to_pylist()
    assert problems == []
    assert (trace["reward"], trace["policy_key"], trace["num_output_tokens"]) == (1.0, "", 1)
    assert [(row["role"], row["content"], row["sampled"]) for row in said] == [
        ("user", "2 + 2", False),
        ("assistant", "4", True),
    ]
    assert said[1]["token_ids"] == [ord("a"), ord("4")] and said[1]["mask"] == [False, True]
    assert json.loads(found.examples()["task"][0].as_py())["prompt"] == "2 + 2"


def test_results_of_earlier_verifiers(tmp_path: Path) -> None:
    line = {"example_id": 7, "prompt": [ASKED], "completion": [ANSWERED], "answer": "4", "task": "sums"}
    line |= {"reward": 0.5, "metrics": {"exact": 1.0}, "info": {"seen": True}, "generation_ms": 3.5}
    (trace,) = rows(tmp_path / "results.jsonl", [line])
    assert (trace["environment"], trace["example_id"], trace["reward"]) == ("sums", "7", 0.5)
    assert json.loads(trace["metrics"]) == {"exact": 1.0} and json.loads(trace["info"]) == {"seen": True}
    data = json.loads(trace["record"])["task"]["data"]
    assert (data["answer"], data["generation_ms"]) == ("4", 3.5)


def test_no_reward_is_not_a_reward_of_zero(tmp_path: Path) -> None:
    lines = [{"messages": [ASKED, ANSWERED]}, {"messages": [ASKED, ANSWERED], "reward": 0}]
    assert [trace["reward"] for trace in rows(tmp_path / "t.jsonl", lines)] == [None, 0.0]


def test_equal_lines_are_different_rollouts_of_one_group(tmp_path: Path) -> None:
    line = {"prompt": "2 + 2", "completion": "4", "reward": 1.0}
    other = {"prompt": "3 + 3", "completion": "4", "reward": 0.0}
    traces = rows(tmp_path / "t.jsonl", [line, other, line])
    assert len({trace["trace_id"] for trace in traces}) == 3
    assert [trace["assignment_id"] for trace in traces] == ["0-0/0", "0-1/0", "0-0/1"]
    again = rows(tmp_path / "copy.jsonl", [line, other, line])
    assert [trace["trace_id"] for trace in again] == [trace["trace_id"] for trace in traces]


def test_a_prompt_may_hold_earlier_answers(tmp_path: Path) -> None:
    line = {"prompt": [ASKED, ANSWERED, ASKED], "completion": "four"}
    (trace,) = rows(tmp_path / "t.jsonl", [line])
    assert (trace["num_turns"], trace["num_output_tokens"]) == (1, 4)


def test_parquet_is_read_by_row(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    good = {"messages": [ASKED, ANSWERED], "reward": 1.0}
    pl.DataFrame([good, {"messages": [ASKED], "reward": 1.0}]).write_parquet(path)
    episodes, problems = read_files([path], "auto", READING)
    assert len(episodes) == 1
    assert [(problem.line, problem.reason) for problem in problems] == [
        (2, "the conversation does not end with an assistant message")
    ]


BAD = [
    ("{", "the line is not JSON"),
    ("[1]", "the line is no JSON object"),
    ('{"text": "hello"}', "the line is in no known form"),
    ('{"messages": [], "reward": 1}', "the conversation does not end with an assistant message"),
    ('{"messages": [{"content": "x"}]}', "a message has no known role"),
    ('{"prompt": "x", "completion": 3}', "messages are neither text nor a list of messages"),
    ('{"prompt": "x", "completion": "y", "reward": "high"}', "what should be a number is none"),
    ('{"prompt": "x", "completion": "y", "reward": true}', "what should be a number is none"),
    ('{"prompt": "x", "completion": "y", "info": "no json"}', "a field is neither an object nor JSON"),
    ('{"prompt": "x", "completion": "\\ud83d"}', "the line is not UTF-8"),
]


@pytest.mark.parametrize(("text", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_a_bad_line_is_named(text: str, reason: str, tmp_path: Path) -> None:
    episodes, problems = read(tmp_path / "t.jsonl", ["", json.dumps({"prompt": "x", "completion": "y"}), text])
    assert len(episodes) == 1
    assert [(problem.line, problem.reason) for problem in problems] == [(3, reason)]


@pytest.mark.parametrize(("form", "lacks"), [("messages", "messages"), ("prompt", "prompt"), ("verifiers", "traces")])
def test_a_form_that_was_asked_for_is_held_to(form: str, lacks: str, tmp_path: Path) -> None:
    line = {"messages": [ASKED, ANSWERED]} if form != "messages" else {"prompt": "x", "completion": "y"}
    episodes, problems = read(tmp_path / "t.jsonl", [line], form=form)
    assert episodes == [] and lacks in str(problems[0])


ROLLOUTS = [{"prompt": "add 1 and 1", "completion": str(n), "reward": float(n == 2)} for n in range(4)]


@pytest.mark.parametrize(
    "fields",
    [
        lambda n: {"example_id": "q1", "generation_ms": 100 + n, "scoring_ms": n},  # as in verifiers' results.jsonl
        lambda n: {"generation_ms": 100 + n},
        lambda n: {"group_id": "g0", "id": n},
        lambda n: {"group_id": "g0", "id": n, "example_id": "q1"},
        lambda n: {"example_id": "q1", "id": n},
    ],
)
def test_what_is_of_the_row_makes_no_groups_of_one(fields: Callable[[int], dict[str, Any]], tmp_path: Path) -> None:
    lines = [line | fields(number) for number, line in enumerate(ROLLOUTS)]
    found = arrange(read(tmp_path / "r.jsonl", lines)[0])
    assert found.assignments(0)["assignment_id"].to_pylist() == ["0-0/0", "0-0/1", "0-0/2", "0-0/3"]
    assert found.examples().num_rows == 1
    assert found.groups() == {"groups": 1, "of more than one rollout": 1, "with differing rewards": 1}


def test_another_prompt_is_another_group_whatever_the_file_calls_it(tmp_path: Path) -> None:
    lines = [line | {"group_id": "g0", "example_id": "q"} for line in [*ROLLOUTS, ROLLOUTS[0] | {"prompt": "add 2"}]]
    found = arrange(read(tmp_path / "r.jsonl", lines)[0])
    assert found.examples()["example_id"].to_pylist() == ["q", "q#2"]
    assert found.groups() == {"groups": 2, "of more than one rollout": 1, "with differing rewards": 1}


def test_the_fields_of_a_row_stay_with_its_trace(tmp_path: Path) -> None:
    lines = [line | {"example_id": "q1", "answer": n} for n, line in enumerate(ROLLOUTS)]
    traces = arrange(read(tmp_path / "r.jsonl", lines)[0]).traces(0)
    tasks = [json.loads(record)["task"]["data"] for record in traces["record"].to_pylist()]
    assert [task["answer"] for task in tasks] == [0, 1, 2, 3], "each is scored again by its own"
