"""What a terminal and a pipe get: listings with stable names, short ids, completion, versions, the glossary."""

import inspect
import json
import re
import shlex

import pytest

from flows import cli
from flows.cli.arguments import app, named_policy
from flows.cli.commands import COMMANDS
from flows.queries.row_lineage import UnknownId
from storage.store import open_store
from tests.fixtures.terminals import Terminal

LISTINGS = ("runs", "traces large:2", "evals large", "sql 'from large.updates'")
"""Commands that print a table alone."""
OTHER_WORDS = re.compile(
    r"\b(checkpoints?|trajector(y|ies)|completions?|problems?|responses?|generations|model versions?)\b"
)
"""Words of other trainers for things that the glossary has a word for: policy, rollout, reply, example."""


@pytest.mark.engine
@pytest.mark.parametrize("command", LISTINGS)
def test_a_pipe_gets_a_line_with_tabs_for_each_record(command, forked, capsys):
    argv = [*shlex.split(command), "--store", str(forked)]
    assert cli.main(argv) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1 and {line.count("\t") for line in lines} == {heading.count("\t")} != {0}
    assert cli.main([*argv, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    rows = values["traces"]["rows"] if "traces" in command else values
    assert {*heading.split("\t")} <= {*rows[0]} and len(rows) == len(lines)


def test_every_command_that_lists_has_json():
    listing = [name for name, command in COMMANDS.items() if command.help.strip().startswith(("List", "Query"))]
    assert {"runs", "traces", "evals", "gate", "engines", "sql"} <= {*listing}
    others = ["status", "quarantine", "note", "version", "diff", "lineage", "why", "trace", "show"]
    for name in (*listing, *others):
        assert "as_json" in inspect.signature(app[name].default_command).parameters, name


@pytest.mark.engine  # processes on terminals of their own
def test_a_terminal_of_80_columns_shows_replies_and_the_first_difference(forked):
    for argv in (["runs"], ["traces", "large:2"], ["diff", "large", "large-rloo"]):
        with Terminal(*argv, "--store", str(forked)) as terminal:
            lines = terminal.lines()
        assert max(map(len, lines)) <= 80 and len(lines) <= 40
    assert lines[0] == "a: large" and any(line.startswith("first rollout: b: ") for line in lines)


@pytest.mark.engine
def test_the_first_characters_of_a_key_name_a_policy(forked, monkeypatch):
    (key, *_) = [entry.key for entry in open_store(forked).ledger.entries(run="large", stage="training")]
    assert named_policy(str(forked), key[:8]) == "large:1" == named_policy(str(forked), "large:1")
    with pytest.raises(UnknownId, match="names no policy"):
        named_policy(str(forked), "0" * 8)
    monkeypatch.setattr(type(open_store(forked).runs), "names", lambda runs: ["20261130"])
    assert named_policy(str(forked), "20261130") == "20261130", "a run may have such a name"


@pytest.mark.engine
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("show --store STORE l", {"large", "large-again", "large-rloo"}),
        ("run demo a", {"demo", "algorithm.type="}),
        ("config a", {"algorithm.type"}),
        ("resume --store STORE l", {"large", "steps="}),
    ],
)
def test_shells_are_told_runs_presets_and_keys(typed, offered, forked, capsys):
    assert cli.main(["__complete", *typed.replace("STORE", str(forked)).split()]) == 0
    assert offered <= {line.split("\t")[0] for line in capsys.readouterr().out.splitlines()}


def test_versions_are_those_that_a_report_needs(capsys):
    assert cli.main(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    assert versions["prefect"] and versions["deltalake"] and versions["torch"] and versions["python"].startswith("3.")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_uses_the_words_of_the_glossary(name, capsys):
    assert cli.main([name, "--help"]) == 0
    assert OTHER_WORDS.findall(capsys.readouterr().out.lower()) == []
