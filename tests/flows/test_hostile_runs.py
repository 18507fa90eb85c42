"""Runs of an enemy through what people and programs look at them with: nothing acts, breaks or is lost."""

import csv
import json
import shlex

import pytest

from flows import cli
from flows.orchestration.gate_answers import summary
from tests.fixtures.faults import happened
from tests.fixtures.hostile import (
    ALL,
    ENVIRONMENT,
    HELD_OUT,
    TEXTS,
    acting,
    hostile_store,
    kinds,
)

pytestmark = pytest.mark.engine

ACTIVE = {"html_block", "html_inline", "link_open", "image", "code_inline"}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return hostile_store(tmp_path_factory.mktemp("hostile") / "store")


@pytest.fixture
def said(hostile, capsys):
    """Run a command on the store and return what it printed; nothing of it may act on a terminal."""

    def run(*argv, status=0):
        capsys.readouterr()
        assert cli.main([*argv, "--store", hostile.store.root.address]) == status
        printed = capsys.readouterr()
        assert not acting(printed.out) and not acting(printed.err)
        return printed.err if status else printed.out

    return run


@pytest.mark.fault("hostile text", "every text of a run is hostile", "a command prints nothing that acts on a terminal")
@pytest.mark.parametrize(
    "command",
    [
        "runs",
        "show base",
        "show replayed",
        "show refused",
        "diff base replayed",
        "diff base refused --step 0",
        "evals base",
        "gate base",
        "gate refused",
        "quarantine --list",
        "sql 'select * from traces limit 8'",
        "sql 'select * from messages limit 8'",
        "sql 'select * from examples limit 2'",
        "sql 'select * from verdicts limit 2'",
        "sql 'select * from decisions'",
        "sql 'select * from runs'",
        "sql 'select 1 as \"[bold]x\x1b[31m\u202e\"'",
    ],
)
def test_commands_print_nothing_that_acts(said, command):
    happened(printed := said(*shlex.split(command)))
    assert printed


@pytest.mark.parametrize(
    "command", ["show base", "show replayed", "diff base replayed", "evals base", "quarantine --list"]
)
def test_answers_for_programs_are_whole(said, command):
    assert json.loads(said(*command.split(), "--json"))


def test_rich_markup_is_shown_literally(said):
    printed = said("sql", "select agent from traces limit 1")
    assert TEXTS["rich"] in printed and "␛[31m" in printed
    for name in (ENVIRONMENT, HELD_OUT):
        assert name.replace("\x1b", "␛").replace("\u202e", "⟨U+202E⟩") in said("show", "base")


@pytest.mark.parametrize("place", [0, 5])
def test_why_says_one_line_for_each_thing(hostile, said, place):
    printed = said("why", hostile.traces[place])
    assert len(printed.split("\n\n")) >= 3, "the rollout and what each of two runs made of it"
    assert "group.group_id: 0-" in printed
    assert len(printed) < 20_000, "long evidence is cut, and nothing after"
    assert json.loads(said("why", hostile.traces[place], "--json"))["trace"]["trace_id"] == hostile.traces[place]


@pytest.mark.parametrize("place", [0, 5])
def test_lineage_goes_both_ways_from_any_id(hostile, said, place):
    printed = said("lineage", hostile.traces[place])
    assert "came from:" in printed and "became:" in printed
    assert json.loads(said("lineage", hostile.traces[place], "--json"))["id"] == hostile.traces[place]


@pytest.mark.fault("hostile text", "what is asked for is hostile", "one message that acts on nothing")
@pytest.mark.parametrize(
    "text", [TEXTS[name] for name in ("handler", "screen", "eight_bit", "rich", "overrides", "sql")]
)
def test_what_is_asked_for_may_be_hostile_too(said, text):
    happened(repr(text))
    assert "names no trace" in said("why", text + "?", status=2)
    assert said("sql", f"select {text} from", status=2).startswith("stagecoach: ")


def test_a_program_is_given_every_character(hostile, capsys, tmp_path):
    root = hostile.store.root.address
    query = "select stop_condition from base.traces where group_id not like 'eval-%'"
    capsys.readouterr()
    assert cli.main(["sql", query, "--json", "--store", root]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert cli.main(["sql", query, "--output", str(tmp_path / "rows.csv"), "--store", root]) == 0
    with (tmp_path / "rows.csv").open(newline="") as file:
        for rows in (printed, list(csv.DictReader(file))):
            assert [row["stop_condition"] for row in rows] == [ALL] * len(hostile.traces)


def test_an_export_is_json_with_every_character(hostile, said, tmp_path):
    target = tmp_path / "episodes.jsonl"
    said("export", "base", "--format", "verifiers", "--quarantined", "--to", str(target))
    traces = [trace for line in target.read_bytes().split(b"\n")[:-1] for trace in json.loads(line)["traces"]]
    assert {trace["id"] for trace in traces} == set(hostile.traces)
    assert {trace["task"]["data"]["prompt"] for trace in traces} == {ALL}
    assert {trace["task"]["data"]["half"] for trace in traces} == {"\ud800"}


def test_questions_hold_no_marks(hostile):
    assert len(hostile.questions) == 3
    for each in hostile.questions:
        page = summary("base", each)
        assert not kinds(page) & (ACTIVE | {"fence"})
        assert not acting(page)


def test_ten_megabytes_of_one_line_are_cut(said):
    line = "<b>\x1b[31m\u202ex"
    printed = said("sql", f"select repeat('{line}', {10 * 2**20 // len(line.encode())}) as content")
    assert printed.count("<b>␛[31m⟨U+202E⟩x") > 100 and len(printed) < 10_000 and "…" in printed
