"""Files of an enemy: one message each, nothing imported, no store made; what comes in can be looked at."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tasks.exchange import files
from tests.fixtures.commands import run_command
from tests.flows.exchange.files import TOKENS, lines

EPISODE = lines(TOKENS)[0]
TRACE = EPISODE["traces"][0]
LINE = json.dumps(EPISODE)


def trace(**changes: Any) -> str:
    return json.dumps(EPISODE | {"traces": [TRACE | changes]})


def with_field(field: str, text: str) -> str:
    return LINE[:-1] + f', "{field}": {text}}}'


def scored(score: Any, weight: Any = 1.0) -> str:
    return trace(rewards={"reward": {"score": score, "weight": weight}})


def of_step(step: Any) -> str:
    return json.dumps(EPISODE | {"run": {"work": {"type": "train", "step": step}}})


DEEP = "[" * 900 + "]" * 900
LINES = {
    "deep": (with_field("info", f'{{"x": {DEEP}}}'), "nested more than 128 levels"),
    "deeper than the stack": (with_field("note", "[" * 10**5 + "]" * 10**5), "nested"),
    "deep in a trace": (trace(state=json.loads(DEEP)), "nested more than 128 levels"),
    "5000 digits": (with_field("note", "1" * 5000), "a number has more than 100 digits"),
    "5000 digits below zero": (with_field("note", "-" + "1" * 5000), "a number has more than 100 digits"),
    "101 digits in a trace": (trace(state=10**100), "a number has more than 100 digits"),
    "key twice": (with_field("id", "2"), "a key is there twice: 'id'"),
    "key twice inside": (with_field("info", '{"a": {"b": 1, "b": 2}}'), "a key is there twice: 'b'"),
    "empty metric of a trace": (trace(metrics={"": 1.0}), "metrics: a name is empty: metrics."),
    "blank metric": (trace(metrics={" ": 1}), "metrics: a name is empty: metrics. "),
    "metric of 90 digits": (trace(metrics={"a": 10**90}), "a metric is out of range"),
    "metrics of no name": (trace(metrics=""), "metrics: Input should be"),
    "rewards of no name": (trace(rewards=[1.0]), "rewards: Input should be"),
    "no metrics": (trace(metrics=None), "metrics: Input should be"),
    "empty reward": (trace(rewards={"": {"score": 1.0, "weight": 1.0}}), "rewards: a name is empty: rewards."),
    "empty reward of a failed rollout": (trace(ok=False, rewards={"": 1}), "rewards: a name is empty: rewards."),
    "blank reward of a failed rollout": (trace(ok=False, rewards={" ": None}), "rewards: a name is empty: rewards. "),
    **{f"score {value}": (scored(value), "rewards.score: Input should be") for value in (
        float("nan"), float("inf"), float("-inf"), 1e300, -1e300, 10**40
    )},
    "weight": (scored(1.0, float("inf")), "rewards.weight: Input should be"),
    **{f"step {value}": (of_step(value), "step") for value in (-1, 1.5, True, "3", 1e300, float("nan"), 10**40)},
    "policy": (
        json.dumps(EPISODE | {"run": {"work": {"type": "train", "step": 1, "policy": {"start": 10**40}}}}),
        "version of the policy",
    ),
    "temperature": (trace(calls=[{"sampling": {"temperature": float("inf")}}]), "temperature: inf"),
    "agent": (trace(agent={"name": True}), "of another type than its column: agent: "),
    "stop condition": (trace(stop_condition=1.5), "of another type than its column: stop_condition: "),
    "error": (
        trace(ok=False, errors=[{"type": 1.5, "message": "x"}]),
        "of another type than its column: error_type: ",
    ),
    "time": (trace(timing={"start": 1e300}), "the line is malformed"),
    "span": (trace(timing={"start": 1.0, "scoring": {"start": 0.0, "end": 1e300}}), "seconds: 1e+300"),
}  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> str:
    """Import, which is refused by one message and leaves no store; return what it said."""
    status, said = run_command(capsys, "import", *arguments, "--store", str(root))
    assert status == 2 and said.startswith("stagecoach: ") and "Traceback" not in said and len(said) < 2000
    assert "Nothing was written" in said and not root.exists()
    return said


@pytest.mark.fault("input", "a line of a file to import that would harm", "the line is named, nothing written")
@pytest.mark.parametrize(("line", "words"), LINES.values(), ids=LINES)
def test_a_line_that_would_harm_is_refused_by_name(tmp_path, capsys, line, words):
    file = tmp_path / "x.jsonl"
    file.write_text(f"{json.dumps(EPISODE)}\n{line}\n")
    said = refused(capsys, tmp_path / "store", str(file))
    assert f"{file}, line 2: " in said and words in said


@pytest.mark.fault("input", "a path with an absurd step", "refused, nothing written")
def test_the_step_of_a_path_is_bounded_too(tmp_path, capsys):
    file = tmp_path / f"step_{'9' * 200}.jsonl"
    file.write_text(f"{LINE}\n")
    assert "step of the path" in refused(capsys, tmp_path / "store", str(file))


def test_a_text_with_many_digits_is_no_number(tmp_path, capsys):
    file = tmp_path / "x.jsonl"
    file.write_text(trace(info={"pi": "3" * 5000, "whole": 10**99, "measured": [1e300]}, metrics={"a": float("nan")}))
    assert run_command(capsys, "import", str(file), "--name", "a", "--store", str(tmp_path / "store"))[0] == 0


@pytest.mark.fault("input", "a pipe, a directory or a device to import", "refused, nothing written")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_not_read(tmp_path, capsys, make):
    make(tmp_path / "x.jsonl")
    assert "is no regular file" in refused(capsys, tmp_path / "store", str(tmp_path / "x.jsonl"))


@pytest.mark.fault("input", "a line without an end", "refused, nothing written")
def test_a_line_without_an_end_is_not_read_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 1000)
    (tmp_path / "x.jsonl").write_text(f"{{}}\n{'x' * 1001}")
    assert "line 2: longer than 1000 bytes" in refused(capsys, tmp_path / "store", str(tmp_path / "x.jsonl"))
