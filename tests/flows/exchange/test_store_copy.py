"""A run in another store is shown, traced and replayed there as where it was made."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from flows.exchange.export import copy_run
from flows.exchange.export_rows import ExportRefused
from storage.errors import RunUnknown
from storage.store import open_store
from tests.fixtures.rehearsal import rehearse
from tests.fixtures.replays import RLOO, ask, pieces, quarantine, walk
from tests.flows.exchange.files import rows


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with a run of two steps, two of its rollouts in quarantine, and a replay of it."""
    root = tmp_path / "store"
    quarantine(rehearse(root, "base"), 1, 2)
    walk(ask(root, name="again", overrides=[RLOO]))
    return root


def copy(root: Path, run: str, target: Path) -> int:
    """Copy a run; return how many ledger rows were new."""
    return copy_run(run, str(target), str(root)).rows


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """Return what a command prints as JSON, without where the store is."""
    capsys.readouterr()
    assert cli.main(list(argv)) == 0
    said = capsys.readouterr().out
    return json.loads(said.replace(argv[argv.index("--store") + 1], "STORE"))


def test_runs_are_shown_and_traced_as_where_they_were_made(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_id = rows(root, "base", "traces")["trace_id"][0].as_py()
    for run, more in (("again", []), ("base", [["lineage", trace_id]])):  # a row's lineage names all runs that share it
        copy(root, run, tmp_path / "other")
        for command in (["show", run], ["why", trace_id, "--run", run], *more):
            here, there = (answer(capsys, *command, "--json", "--store", str(at)) for at in (root, tmp_path / "other"))
            assert here == there


def test_a_replay_of_the_copy_finds_and_leaves_out_what_one_of_the_original_does(root: Path, tmp_path: Path) -> None:
    copy(root, "base", tmp_path / "other")
    asked = {"name": "more", "overrides": [RLOO], "quarantine": True}
    here, there = ask(root, **asked), ask(tmp_path / "other", **asked)
    assert [each.key for each in pieces(here)] == [each.key for each in pieces(there)]
    walk(here), walk(there)
    made = [open_store(at).ledger.entries(run="more") for at in (root, tmp_path / "other")]
    digests = [[(row.stage, row.step, piece.digest) for row in rows for piece in row.outputs] for rows in made]
    assert digests[0] == digests[1] and {row.stage for row in made[1]} >= {"filtering", "advantage", "packing"}
    sampled = [piece.run for row in made[1] if row.stage in ("assignment", "rollout") for piece in row.outputs]
    assert set(sampled) == {"base"}, "nothing was sampled again"
    verdicts = [row.slices("verdicts") for row in made[1] if row.stage == "filtering"]
    reasons = [open_store(tmp_path / "other").read(slices)["reason"].to_pylist() for slices in verdicts]
    assert [each.count("quarantined") for each in reasons] == [0, 2], reasons


def test_the_original_goes_on_in_the_copy_and_computes_nothing(root: Path, tmp_path: Path) -> None:
    copy(root, "base", tmp_path / "other")
    before = open_store(tmp_path / "other").ledger.entries()
    rehearse(tmp_path / "other", "base")
    assert open_store(tmp_path / "other").ledger.entries() == before


def test_a_replay_that_may_go_on_brings_the_run_that_it_goes_through(root: Path, tmp_path: Path) -> None:
    copy(root, "again", tmp_path / "finished")
    assert open_store(tmp_path / "finished").runs.names() == ["again"]
    open_store(root).runs.record(run="again", event="failed")
    copy(root, "again", tmp_path / "other")
    assert set(open_store(tmp_path / "other").runs.names()) == {"base", "again"}
    assert copy(root, "base", tmp_path / "other") == 0


def test_a_run_that_is_not_there_and_a_store_into_itself_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(RunUnknown, match="nobody"):
        copy(root, "nobody", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(ExportRefused, match="is the store that run 'base' is in"):
        copy(root, "base", root)


def test_the_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "other")
    argv = ["export", "base", "--format", "store", "--to", target, "--store", str(root)]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.startswith(f"{target}: run base with ")
    assert cli.main([*argv, "--with-policies"]) == 0
    assert capsys.readouterr().out == f"{target}: run base is there already, nothing was copied\n"
    for option in (["--kept"], ["--steps", "1"], ["--sql", "select 1"], ["--force"]):
        assert cli.main([*argv, *option]) == 2
        assert f"{option[0]} chooses parts or replaces" in capsys.readouterr().err
    assert cli.main(["export", "--format", "store", "--to", target]) == 2
    assert "needs a RUN" in capsys.readouterr().err
    assert cli.main(["export", "base", "--format", "sft", "--to", str(tmp_path / "x"), "--with-policies"]) == 2
    assert "belongs to --format store" in capsys.readouterr().err
