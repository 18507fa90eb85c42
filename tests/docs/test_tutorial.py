"""The tutorial: its script, its two reward functions and its config do what the page says."""

import json
import re
import runpy
from pathlib import Path

import pytest

from configs.load import load

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILES = re.findall(r"```\w+\n# ([\w.]+)\n(.*?)```", TEXT, re.DOTALL)


def files(name):
    """Return the texts that the page shows for a file, in order."""
    return [text for file, text in FILES if file == name]


def scores():
    """Return the reward functions of the page, the first idea first."""
    made = []
    for text in files("rewards.py"):
        names = {}
        exec(text, names)
        made.append(names["score"])
    return made


def test_the_script_writes_the_rows_that_the_page_shows(tmp_path, monkeypatch):
    (script,) = files("examples.py")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples.py").write_text(script, encoding="utf-8")
    runpy.run_path("examples.py")
    lines = (tmp_path / "examples.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 996 and "\n".join(lines[:2]) in TEXT
    assert all(row["prompt"].endswith(f": {row['answer'][::-1]}") for row in map(json.loads, lines))


@pytest.mark.parametrize(
    ("reply", "answer", "first", "second"),
    [
        ("<rev>ovl</rev>", "ovl", 1.0, 1.0),
        ("<rev>lvoo</rev>", "ovl", 1.0, 0.25),
        ("<rev>jydau</rev>", "jadyr", 1.0, 0.4),
        ("ovl", "ovl", 0.5, 0.0),
        ("<rev></rev>", "lll", 0.5, 0.0),
    ],
)
def test_the_reward_functions_score_as_the_page_says(reply, answer, first, second):
    assert [score(reply, answer, {}) for score in scores()] == [pytest.approx(first), pytest.approx(second)]


def test_the_config_is_one(tmp_path):
    (text,) = files("own.toml")
    (tmp_path / "own.toml").write_text(text, encoding="utf-8")
    config = load([tmp_path / "own.toml"])
    assert (config.environments[0].taskset["id"], config.steps, config.evaluation.every) == ("own_data", 20, 20)
    assert config.assignment.groups_per_step * config.assignment.group_size == 128
