"""tests/capabilities.toml names only tests and commands that exist, and `make test` shows every capability."""

import ast
import re
import subprocess
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from flows import cli

ROOT = Path(__file__).parents[2]
ROWS = tomllib.loads((ROOT / "tests/capabilities.toml").read_text(encoding="utf-8"))
TESTS = sorted({test for row in ROWS.values() for test in row.get("tests", ())})
COMMANDS = sorted({command for row in ROWS.values() for command in row.get("commands", ())})


@cache
def marks_of(path):
    """Return the marks of each test of a file, its own and those of the whole file, without importing it."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    whole = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    of_all = set(re.findall(r"pytest\.mark\.(\w+)", " ".join(map(ast.unparse, whole))))
    tests = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    return {
        test.name: of_all | {ast.unparse(mark).removeprefix("pytest.mark.") for mark in test.decorator_list}
        for test in tests
    }


def test_the_rows_are_those_of_a_whole_product():
    assert len(ROWS) > 200 and len(TESTS) > 300 and COMMANDS
    names = [row["name"] for row in ROWS.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_a_state_and_evidence(row):
    entry = ROWS[row]
    assert entry.keys() <= {"name", "state", "note", "at_length", "tests", "commands"}
    evidence = entry.get("tests") or entry.get("commands")
    if entry["state"] in ("open", "withdrawn"):
        assert entry["note"] and not evidence
    else:
        assert evidence and (entry["state"] == "done" or (entry["state"] == "partly" and entry["note"]))


@pytest.mark.parametrize("test", TESTS)
def test_tests_are_there(test):
    path, _, name = test.partition("::")
    assert path.startswith("tests/") and (name in marks_of(path) if name else marks_of(path))


@pytest.mark.parametrize("row", [row for row, entry in ROWS.items() if "tests" in entry])
def test_make_test_shows_every_capability(row):
    named = [test.partition("::") for test in ROWS[row]["tests"]]
    tests = [marks for path, _, name in named for test, marks in marks_of(path).items() if name in ("", test)]
    runs = any("essential" in marks or not marks & {"engine", "browser"} for marks in tests)
    assert runs == ("at_length" not in ROWS[row])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_there(command):
    program, *arguments = command.split()
    if program == "stagecoach":
        cli.parse(arguments)
    elif program == "python":
        assert arguments[0] == "-m" and find_spec(arguments[1])
    else:
        line = f"make -n {' '.join(arguments)}" if program == "make" else command
        assert program in ("make", "!")
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
