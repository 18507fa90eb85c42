"""The table of capabilities names only what is there: files, names in them, tests, commands."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from flows import cli

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "capabilities.md"
COLUMNS = ["row", "capability", "state", "where", "shown by"]
STATE = re.compile(r"done(; by design: .+)?|partly: .+|not yet")
PLACE = re.compile(r"([\w./-]+)(?: \(([^)]+)\))?")
MENTIONED = re.compile(r"`((?:tests|benchmarks)/[^`:]+)(?:::([^`]+))?`")
TYPED = re.compile(r"`((?:make|stagecoach) [^`]+)`")
AT_LENGTH = {
    "S1": "the whole demo",
    "S4": "a server with workers and a schedule",
    "S12": "every fault, to its time limit",
}
"""Rows that `make test` has no time for, and what takes it: `make test-all` shows them."""


def cells(line: str) -> dict[str, str]:
    """Return the cells of a line of the table by column; a pipe within a cell is written with a backslash."""
    found = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    assert len(found) == len(COLUMNS), f"{len(found)} cells instead of {len(COLUMNS)}: {line}"
    return dict(zip(COLUMNS, found, strict=True))


LINES = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if re.match(r"\| [A-Z]+\d+ \|", line)]
ROWS = [cells(line) for line in LINES]
PLACES = sorted({match.groups() for row in ROWS for match in PLACE.finditer(row["where"])}, key=str)
TESTS = sorted({match.groups() for line in LINES for match in MENTIONED.finditer(line)}, key=str)
COMMANDS = sorted({command for line in LINES for command in TYPED.findall(line)})


@cache
def functions_of(path: Path) -> set[str]:
    """Return the names of the functions of a file, without importing it."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@cache
def marks_of(path: Path) -> dict[str, set[str]]:
    """Return the marks of each test of a file, its own and those of the whole file, without importing it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    whole = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    of_all = set(re.findall(r"pytest\.mark\.(\w+)", " ".join(map(ast.unparse, whole))))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    own = {
        test.name: {ast.unparse(each).removeprefix("pytest.mark.") for each in test.decorator_list} for test in tests
    }
    return {name: of_all | marks for name, marks in own.items()}


def test_every_row_is_there_once() -> None:
    names = [row["row"] for row in ROWS]
    assert len(names) == len(set(names)) > 100


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["row"])
def test_a_state_is_one_of_three_and_is_shown(row: dict[str, str]) -> None:
    assert STATE.fullmatch(row["state"])
    has_evidence = (bool(row["where"]), bool(row["shown by"]))
    if row["state"] == "not yet":
        assert has_evidence == (False, False)
    elif row["state"].startswith("done"):
        assert has_evidence == (True, True)
    else:
        assert row["where"]


@pytest.mark.parametrize(("path", "names"), PLACES, ids=lambda value: str(value or "whole"))
def test_places_are_there(path: str, names: str | None) -> None:
    assert (ROOT / path).exists()
    if names:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert [name for name in names.split(", ") if name not in text] == []


@pytest.mark.parametrize(("path", "name"), TESTS, ids=lambda value: str(value or "whole"))
def test_tests_are_there(path: str, name: str | None) -> None:
    assert (ROOT / path).is_file()
    assert name is None or (name.startswith("test_") and name in functions_of(ROOT / path))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["row"])
def test_make_test_shows_every_capability(row: dict[str, str]) -> None:
    named = [(path, name) for path, name in MENTIONED.findall(row["shown by"]) if path.startswith("tests/")]
    tests = [marks for path, name in named for test, marks in marks_of(ROOT / path).items() if name in ("", test)]
    runs = any("essential" in marks or not marks & {"engine", "browser"} for marks in tests)
    assert runs == (row["row"] not in AT_LENGTH) or not tests


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_there(command: str) -> None:
    program, *arguments = command.split()
    if program == "stagecoach":
        cli.parse(arguments)
        return
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_named_escapes_the_patterns() -> None:
    """What is in backticks in the last column is a test or a command, so that none of the above is vacuous."""
    told = [item for row in ROWS for item in re.findall(r"`[^`]+`", row["shown by"])]
    unknown = {item for item in told if not MENTIONED.fullmatch(item) and not TYPED.fullmatch(item)}
    assert {item.split()[0] for item in unknown} <= {"`grep"}
    assert PLACES and TESTS and COMMANDS
