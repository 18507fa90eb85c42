"""Ids of imported traces: those that a file has given are no other file's, and the file's own come back."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.exchange.episodes import Episode, Reading
from tasks.exchange.files import read_files
from tasks.exchange.naming import ID_LENGTH, told_apart
from tasks.exchange.traces import source_of
from tests.tasks.exchange.lines import verifiers_lines

NODES = [
    {"message": {"role": "user", "content": "q"}, "token_ids": [1], "mask": [False]},
    {
        "message": {"role": "assistant", "content": "a"},
        "sampled": True,
        "parent": 0,
        "token_ids": [2],
        "mask": [True],
        "logprobs": [-0.5],
    },
]


def read(path: Path, *lines: Any) -> list[Episode]:
    """Return the episodes of a file of these lines, all of them good."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, problems = read_files([path], "auto", Reading())
    assert len(found) == len(lines) and not problems
    return found


@pytest.mark.parametrize("given", ["0", "run/7", "deadbeef"])
def test_an_id_of_a_file_is_told_apart_from_the_same_of_another_rollout(given: str, tmp_path: Path) -> None:
    line = {"id": given, "task": {"data": {"x": 1}}, "nodes": NODES, "rewards": {}}
    (one,) = told_apart(read(tmp_path / "a.jsonl", line))
    (other,) = told_apart(read(tmp_path / "b.jsonl", line | {"task": {"data": {"x": 2}}}))
    (again,) = told_apart(read(tmp_path / "c.jsonl", dict(reversed(line.items()))))
    name = one.traces[0]["trace_id"]
    assert name.endswith(f"-{given}") and len(name) == ID_LENGTH + 1 + len(given)
    assert other.traces[0]["trace_id"] not in (name, given)
    assert again.traces[0]["trace_id"] == name, "the same rollout has the same id"
    assert {row["trace_id"] for row in one.messages} == {one.episode_id} == {name}
    assert source_of(one.traces[0], one.messages) == line


def test_ids_by_chance_stand(tmp_path: Path) -> None:
    spelt = {"id": "c7f9e2a0-52b4-4a07-9b3e-11d6f7f0a1b2", "nodes": NODES, "task": {}}
    found = read(tmp_path / "t.jsonl", *verifiers_lines("tokens"), spelt)
    assert told_apart(found) == found
