"""Files of an enemy: one message each, nothing imported, no store made; what comes in can be looked at."""

import json
import os

import pytest

from tasks.exchange import files
from tests.fixtures.commands import cases, run_command
from tests.flows.exchange.files import TOKENS, lines

EPISODE = lines(TOKENS)[0]
TRACE = EPISODE["traces"][0]
LINE = json.dumps(EPISODE)


DEEP = "[" * 900 + "]" * 900
LONG = {
    "deep": ("text", f'"info": {{"x": {DEEP}}}', "nested more than 128 levels"),
    "deeper than the stack": ("text", f'"note": {"[" * 10**5}{"]" * 10**5}', "nested"),
    "deep in a trace": ("trace", f'{{"state": {DEEP}}}', "nested more than 128 levels"),
    "5000 digits": ("text", f'"note": {"1" * 5000}', "a number has more than 100 digits"),
    "5000 digits below zero": ("text", f'"note": -{"1" * 5000}', "a number has more than 100 digits"),
}
"""Cases as in cases.toml, too long for a file."""


def line_of(kind, value):
    """Return a line with a text at its end, or with other fields of its trace or of itself."""
    if kind == "text":
        return f"{LINE[:-1]}, {value}}}"
    changes = json.loads(value)
    return json.dumps(EPISODE | ({"traces": [TRACE | changes]} if kind == "trace" else changes))


def check_refused(capsys, directory, line, words):
    """Import a good line and a bad one; the bad one is named."""
    file = directory / "x.jsonl"
    file.write_text(f"{LINE}\n{line}\n")
    said = refused(capsys, directory / "store", str(file))
    assert f"{file}, line 2: " in said and words in said


def refused(capsys, root, *arguments):
    """Import, which is refused by one message and leaves no store; return what it said."""
    status, said = run_command(capsys, "import", *arguments, "--store", str(root))
    assert status == 2 and said.startswith("stagecoach: ") and "Traceback" not in said and len(said) < 2000
    assert "Nothing was written" in said and not root.exists()
    return said


@pytest.mark.fault("input", "a line of a file to import that would harm", "the line is named, nothing written")
@cases(__file__, "lines")
def test_a_line_that_would_harm_is_refused_by_name(tmp_path, capsys, name, kind, value, words):
    check_refused(capsys, tmp_path, line_of(kind, value), words)


@pytest.mark.fault("input", "a long line of a file to import that would harm", "the line is named, nothing written")
@pytest.mark.parametrize(("kind", "value", "words"), LONG.values(), ids=LONG)
def test_a_long_line_that_would_harm_is_refused_by_name(tmp_path, capsys, kind, value, words):
    check_refused(capsys, tmp_path, line_of(kind, value), words)


@pytest.mark.fault("input", "a path with an absurd step", "refused, nothing written")
def test_the_step_of_a_path_is_bounded_too(tmp_path, capsys):
    file = tmp_path / f"step_{'9' * 200}.jsonl"
    file.write_text(f"{LINE}\n")
    assert "step of the path" in refused(capsys, tmp_path / "store", str(file))


def test_a_text_with_many_digits_is_no_number(tmp_path, capsys):
    file = tmp_path / "x.jsonl"
    info = {"pi": "3" * 5000, "whole": 10**99, "measured": [1e300]}
    file.write_text(line_of("trace", json.dumps({"info": info, "metrics": {"a": float("nan")}})))
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
