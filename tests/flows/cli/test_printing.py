"""What commands print at 80 columns, into a pipe, and without colours: nothing is cut, no number is broken."""

import re
import shlex
from pathlib import Path

import pytest

from flows import cli
from flows.reporting.formats import console, grid

WIDTH = 80
PRINTING = (
    "runs",
    "show large",
    "status",
    "diff large large-again",
    "evals large large-again",
    "sql 'select * from large.updates'",
    "sql 'select outcome, count(*) as n from large.outcomes group by all'",
    "sql",
    "lineage large:2",
    "why TRACE",
    "trace TRACE --run large",
    "config training demo",
    "check demo seed=1 name=a",
    "quarantine --list",
    "maintain --dry-run",
    "gc --remove large-rloo --force large-rloo",
    "repair --dry-run",
)
"""Commands that print tables and lines of a store or a config."""
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
WITHOUT_STORE = ("config", "check")


def numbers(text):
    """Return the numbers of a text, times and ages left out: they grow from one call to the next."""
    return set(NUMBER.findall(re.sub(r"\d[\d.]* (?:ms|s|min|h)\b", "", text)))


@pytest.mark.engine
@pytest.mark.parametrize("command", PRINTING)
def test_lines_fit_80_columns_and_no_number_is_broken(command, forked, trace_id, capsys, monkeypatch):
    monkeypatch.chdir(forked.parent)
    asked = shlex.split(command.replace("TRACE", trace_id))
    asked += [] if asked[0] in WITHOUT_STORE else ["--store", "store"]
    monkeypatch.setenv("COLUMNS", "400")
    assert cli.main(asked) in (0, 1)
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    assert cli.main(asked) in (0, 1)
    said = capsys.readouterr().out
    # A name may be longer than a terminal: that of a directory, a key, a digest.
    long = [line for line in said.splitlines() if len(line) > WIDTH and max(map(len, line.split())) <= WIDTH - 24]
    assert long == []
    assert numbers(said) <= numbers(wide), "a number that is not there where there is room"
    assert "\x1b" not in said


ROW = ("a-run", "0.12345", "6")


@pytest.mark.parametrize(
    ("width", "printed"),
    [
        (20, [" run    reward  n ", " a-run  0.12345  6 "]),
        (15, ["run     a-run", "reward  0.12345", "n       6"]),
    ],
)
def test_a_table_that_does_not_fit_is_records(width, printed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    console().print(grid(("run", "reward", "n"), [ROW]))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [line.split() for line in printed]


def test_a_narrow_table_is_without_its_optional_columns(capsys, monkeypatch):
    for width, shown in ((40, ["a-run", "0.12345", "6"]), (17, ["a-run", "0.12345"]), (15, ["run", "a-run"])):
        monkeypatch.setenv("COLUMNS", str(width))
        console().print(grid(("run", "reward", "n"), [ROW], num_optional=1))
        assert shown in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_pipe_gets_every_line_as_one(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    line = "word " * 60
    console().print(line.strip())
    assert capsys.readouterr().out == line.strip() + "\n"


def test_a_store_in_a_command_of_a_message_is_quoted():
    """Read in the code: a command is to be pasted, whatever its path."""
    flows = Path(cli.__file__).parents[1]
    stores = [text for path in flows.rglob("*.py") for text in re.findall(r"--store \{[^}]*", path.read_text("utf-8"))]
    assert len(stores) > 8 and all("shlex.quote(" in text for text in stores), stores
