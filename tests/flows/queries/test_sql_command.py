"""The command for questions: formats, files, runs, and errors as one message."""

import json
import os
import signal
import threading
from pathlib import Path

import polars as pl
import pytest

from flows import cli
from storage.read import sql as storage_sql
from tests.fixtures.waiting import PATIENCE

FOREVER = "select count(*) from range(100000000000) a, range(1000) b"
BY_RUN = "select run, count(*) as num from outcomes group by run order by run"


def sql(root: Path, *arguments: str) -> int:
    """Ask on the command line."""
    return cli.main(["sql", *arguments, "--store", str(root)])


def test_formats_say_the_same(root, frames, tmp_path, capsys):
    expected = dict(frames["outcomes"].group_by("run").len().sort("run").collect().iter_rows())

    def printed(*arguments: str) -> str:
        assert sql(root, BY_RUN, *arguments) == 0
        return capsys.readouterr().out

    assert {row["run"]: row["num"] for row in json.loads(printed("--json"))} == expected
    assert [line.split() for line in printed().splitlines()[1:]] == [[run, str(num)] for run, num in expected.items()]
    for name in ("answer.parquet", "answer.json", "answer.csv"):
        assert printed("--output", str(tmp_path / name)) == f"6 rows in {tmp_path / name}\n"
    assert dict(pl.read_parquet(tmp_path / "answer.parquet").iter_rows()) == expected
    assert json.loads((tmp_path / "answer.json").read_text()) == pl.read_csv(tmp_path / "answer.csv").to_dicts()


def test_lists_and_times_have_a_form_everywhere(root, tmp_path, capsys):
    question = "select sample_ids, token_ids from base.batches where row = 0 and step = 0"
    assert sql(root, question, "--tokens", "--output", str(tmp_path / "rows.csv")) == 0
    (row,) = pl.read_csv(tmp_path / "rows.csv").to_dicts()
    assert json.loads(row["sample_ids"])[0].startswith("trace-0-") and json.loads(row["token_ids"])
    capsys.readouterr()
    assert sql(root, "select max(started_at) as latest from ledger", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["latest"].endswith("+00:00")


def test_columns_of_one_name_are_all_there(root, tmp_path, capsys):
    query, path = "select 1 as a, [2] as a", tmp_path / "answer.csv"
    assert sql(root, query) == sql(root, query, "--output", str(path)) == 0
    assert path.read_text() == '"a","a"\n1,"[2]"\n'
    assert capsys.readouterr().out.split()[:4] == ["a", "a", "1", "[2]"]


def test_the_rows_of_one_run(root, rows, capsys):
    used = len(rows("branch", "traces"))
    assert sql(root, "select count(*) as num from branch.traces", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [{"num": used}]
    assert sql(root, "select count(*) as num from traces where run = 'branch'", "--json") == 0
    (computed,) = json.loads(capsys.readouterr().out)
    assert 0 < computed["num"] < used, "what the run computed itself is less than what it uses"


def test_accounts_of_a_run_in_sql(root, capsys):
    question = "select sum(num_traces) as num from branch.accounting union all select count(*) from branch.traces"
    assert sql(root, question, "--json") == 0
    account, table = json.loads(capsys.readouterr().out)
    assert account == table


def test_without_a_question_the_tables_are_listed(root, capsys):
    assert sql(root) == 0
    listed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert {"traces", "ledger", "quarantines", "uses", "outcomes", "accounting"} <= set(listed)
    assert "token_ids" not in listed["messages"] and listed["outcomes"].startswith("run, step, environment, trace_id")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["selec"], "syntax error"),
        (["drop table traces"], "DROP is not a question"),
        (["select 1", "--output", "answer.txt"], "let the file end in .json, .csv, .parquet"),
        (["select 1", "--output", "/proc/nowhere/answer.csv"], "writing answer.csv"),
        (["select * from range(11)", "--rows", "10"], "more than 10 rows"),
        (["select list(range) from range(1000000000)", "--memory", "0.000001"], "more than 1e-06 GiB"),
        ([FOREVER, "--seconds", "0.01"], "longer than 0.01 s"),
        (["select 1", "--rows", "0"], "--rows"),
        (["select 1", "--memory", "0"], "--memory"),
        (["select 1", "--seconds", "nan"], "is not a number"),
        (["select * from test_all_types()"], "cast the column to varchar"),
    ],
)
def test_mistakes_are_one_message(root, capsys, arguments, words):
    assert sql(root, *arguments) == 2
    said = capsys.readouterr()
    assert words in said.err and "Traceback" not in said.err and said.out == ""


def test_ctrl_c_ends_a_question(root, capsys, monkeypatch):
    begun, answer = threading.Event(), storage_sql._answer

    def interrupt() -> None:
        assert begun.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(storage_sql, "_answer", lambda *given: begun.set() or answer(*given))
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert sql(root, FOREVER, "--seconds", "300") == 130
    thread.join()
    printed = capsys.readouterr()
    assert "Interrupted" in printed.err and "Traceback" not in printed.err


@pytest.mark.parametrize("command", [["sql", "select 1"], ["lineage", "base:1"], ["why", "trace"], ["show"]])
def test_no_store_is_made_by_asking(tmp_path, capsys, command):
    assert cli.main([*command, "--store", str(tmp_path / "typo")]) == 2
    assert "there is no store" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()
