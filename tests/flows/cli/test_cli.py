"""The command line: what is read, what is called, and what a person is told when it fails."""

import errno
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from configs.errors import ConfigError
from flows import cli
from flows.cli import interrupts
from flows.cli import run as commands
from flows.cli.commands import COMMANDS
from flows.services.process import ServiceFailed
from storage.store import open_store
from tasks.inference.engine.client import EngineError
from tests.fixtures.faults import happened
from tests.fixtures.programs import environment
from tests.fixtures.waiting import PATIENCE

NONE = {"name": "", "store": "", "plain": False}
OF_OTHERS = [
    'evaluation.external.url="http://h/v1"',
    'evaluation.external.model="m"',
    "evaluation.retry_errors=2",
]
Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Put a stand-in in the place of the start of a run, and return the arguments that it gets."""
    started: Calls = []
    monkeypatch.setattr(commands, "start", lambda *args, **kwargs: started.append((args, kwargs)))
    return started


def test_run_takes_files_and_overrides_in_any_order_with_options_between(calls: Calls) -> None:
    assert cli.main(["run", "demo", "steps=3", "--store", "here", "mine.toml", "--name", "a", "seed=1"]) == 0
    settings = {"name": "a", "store": "here", "plain": False}
    assert calls == [(("train", ["demo", "mine.toml"], ["steps=3", "seed=1"]), settings)]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["sft", "x.toml"], (("sft", ["x.toml"], []), NONE)),
        (
            ["eval", "demo", "--policy", "a:3"],
            (("evaluate", ["demo"], ['evaluation.policy="a:3"']), NONE),
        ),
        (
            ["eval", "--url", "http://h/v1", "--model", "m", "--retry-errors", "2"],
            (("evaluate", [], OF_OTHERS), NONE),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_runs_are_started_with_files_and_overrides(calls: Calls, argv: list[str], expected: tuple[Any, ...]) -> None:
    assert cli.main(argv) == 0
    assert calls == [expected]


def test_a_file_with_an_equals_sign_in_its_name_is_a_file(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1.toml").touch()
    cli.main(["run", "lr=1.toml", "lr=2.toml"])
    assert calls[0][0] == ("train", ["lr=1.toml"], ["lr=2.toml"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "name a command"),
        (["fly"], "fly"),
        (["shwo"], 'Did you mean "show"?'),
        (["runs", "--kind", "trian"], 'Did you mean "train"?'),
        (["join", "demo", "--node", "1"], "learner.nodes is 1, and the run's own machine is node 0"),
        (["demo", "demmo"], "did you mean demo?"),
        (["run", "demmo"], "did you mean demo?"),
        (["check", "demo", "algorithm.type=gpro"], "did you mean grpo?"),
        (["run", "--speed"], "--speed"),
        (["traces", "--evaluatoin", "1"], "Did you mean --evaluation?"),
        (["run", "--no-plain"], "--no-plain"),
        (["gc", "--empty-keep"], "--empty-keep"),
        (["doctor", "now"], "now"),
        (["maintain", "a=1"], "a=1"),
        (["replay"], "RUN"),
        (["replay", "a", "--set"], "--set"),
        (["curves"], "RUN"),
        (["export", "a", "--format", "sft"], "--to"),
        (["sql", "--format", "jsn"], '"json"'),
        (["replay", "a", "--policies", ""], '"recorded"'),
        (["diff", "a", "b", "--step", "1.5"], "--step"),
        (["gate", "--approve", "--refuse"], "exclusive"),
        (["traces", "--asc", "--desc"], "exclusive"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_exit_with_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith("stagecoach: ") and said in told
    assert "--help`" in told or "nothing was started" in told or "takes files" in told


def test_settings_of_a_replay_are_grouped_as_they_were_given() -> None:
    settings = ["--set", "x=[1,2]", "y=2", "--plain", "--vary", "b=1", "c=2", "--set", "z=3", "--vary", "[d]=1"]
    command = cli.parse(["replay", "a", *settings])
    assert isinstance(command, partial)
    assert command.args == ("a",)
    assert command.keywords == {
        "overrides": ("x=[1,2]", "y=2", "z=3"),
        "vary": [["b=1", "c=2"], ["[d]=1"]],
        "plain": True,
    }


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        ("run a --name x --name y", {"name": "y"}),
        ("view --save /a b.html", {"save": ("/a", "b.html")}),
        (
            "maintain --retention-hours 24 --retain messages=9d --force --dry-run --json",
            {"retention_hours": 24.0, "retain": ("messages=9d",), "force": True, "dry_run": True, "as_json": True},
        ),
        ("gc --keep a --keep b", {"keep": ("a", "b")}),
        (
            "gc --remove a --force b --policies every:5 --yes --keep-last 2",
            {"remove": ("a",), "force": ("b",), "policies": "every:5", "yes": True, "keep_last": 2},
        ),
        ("resume a --store s --plain", {"store": "s", "plain": True}),
        ("demo steps=2 --plain", {"plain": True}),
        ("evals a b --by tier --output x.parquet", {"by": "tier", "output": "x.parquet"}),
        ("replay a --no-quarantine", {"no_quarantine": True}),
        ("export a --format sft --to x --min-reward -1.5", {"form": "sft", "target": "x", "min_reward": -1.5}),
        ("traces --grep -x --trained yes", {"grep": "-x", "trained": "yes"}),
        ("quarantine --list --where=-reward>1", {"listing": True, "where": "-reward>1"}),
    ],
)
def test_options_are_read(argv: str, given: dict[str, Any]) -> None:
    command = cli.parse(argv.split())
    assert isinstance(command, partial)
    assert command.keywords == given


@pytest.mark.parametrize("argv", [["resume", "a", "b"], ["show", "a", "--name", "b"], ["demo", "mine.toml"]])
def test_arguments_that_do_not_fit_together(calls: Calls, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith("stagecoach: ")
    assert calls == []


def run_failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """Run a command that raises `error`."""
    monkeypatch.setattr(cli, "parse", lambda _: Mock(side_effect=error))
    return cli.main([])


@pytest.mark.parametrize(
    "error", [ConfigError(["a.b: wrong"]), ServiceFailed("it did not start"), EngineError("no answer")]
)
def test_our_errors_are_told_with_their_notes_and_no_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error.add_note("all earlier stages are safe")
    assert run_failing(monkeypatch, error) == 2
    assert capsys.readouterr().err == f"stagecoach: {error}\nall earlier stages are safe\n"


@pytest.mark.parametrize("error", [ValueError("of a library"), AssertionError("ours"), KeyError("x")])
def test_faults_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        run_failing(monkeypatch, error)


def test_looking_for_damage_is_announced_and_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_store(tmp_path / "store")
    monkeypatch.setattr(cli, "parse", lambda _: partial(Mock(side_effect=KeyError("x")), store=str(tmp_path / "store")))
    announced = pytest.warns(UserWarning, match="looking through all of its files for damage.* Ctrl-C ends it")
    with announced, pytest.raises(KeyError):
        cli.main([])
    monkeypatch.setattr("storage.read.damage.damaged_files", Mock(side_effect=KeyboardInterrupt))
    with pytest.warns(UserWarning):
        assert cli.main([]) == 130
    said = capsys.readouterr().err
    assert "Interrupted while looking for damage. Before that: KeyError: 'x'" in said and "Traceback" not in said


@pytest.mark.parametrize("lines", [0, 1, 100_000], ids=["help", "a line", "more than a pipe holds"])
def test_a_reader_who_has_seen_enough_ends_it_without_a_word(
    lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        if lines:
            monkeypatch.setattr(cli, "parse", lambda _: partial(print, "said\n" * lines))
        assert cli.main(["--help"]) == cli.UNREAD
    assert capsys.readouterr().err == ""


def test_another_pipe_that_broke_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokenPipeError, match="of a service"):
        run_failing(monkeypatch, BrokenPipeError("of a service"))


def caused_by(cause: BaseException) -> BaseException:
    error = RuntimeError("of a library")
    error.__cause__ = cause
    return error


def of_disk(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/store/x")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (of_disk(errno.ENOSPC), "no space left\n  Where: /store/x\n"),
        (of_disk(errno.EDQUOT), "no space left\n  Where: /store/x\n"),
        (of_disk(errno.EROFS), "the disk is read-only\n  Where: /store/x\n"),
        (caused_by(of_disk(errno.EROFS)), "the disk is read-only\n  Where: /store/x\n"),
        (sqlite3.OperationalError("database or disk is full"), "no space left"),
        (sqlite3.OperationalError("attempt to write a readonly database"), "the disk is read-only"),
        (ServiceFailed("it ended; its log: No space left on device"), "it ended; its log"),
    ],
)
def test_a_disk_that_takes_nothing_is_one_message_whoever_noticed(
    error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(monkeypatch, error) == 2
    told = capsys.readouterr().err
    assert said in told and "Safe: everything that the ledger names" in told and "then run the same again" in told


def test_an_interrupt_gives_advice_only_where_there_is_something_to_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"
    interrupted = KeyboardInterrupt()
    interrupted.add_note("Go on with: stagecoach resume a")
    assert run_failing(monkeypatch, interrupted) == 130
    assert capsys.readouterr().err == "\nInterrupted. Go on with: stagecoach resume a\n"


COMMAND = """
import sys, time
early = sys.argv.pop() == "early"
if early:
    import builtins
    ordinary = builtins.__import__
    def slow(name, *others, **named):
        if name == "flows.cli.commands":
            print("ready", flush=True)
            time.sleep(100)
        return ordinary(name, *others, **named)
    builtins.__import__ = slow
from flows import cli
def command():
    try:
        print("ready", flush=True)
        time.sleep(100)
    finally:
        print("ending", flush=True)
        time.sleep(1.0)
        print("ended", flush=True)
if not early:
    cli.parse = lambda argv: command
sys.exit(cli.main())
"""


@pytest.mark.fault("signal", "Ctrl-C at the start, pressed three times", "no traceback")
@pytest.mark.engine
@pytest.mark.parametrize("moment", ["early", "later"])
def test_ctrl_c_while_the_program_starts_and_pressed_three_times_leaves_no_traceback(moment: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "--help", moment],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert program.stdout and program.stdout.readline() == "ready\n"
    program.send_signal(signal.SIGINT)
    if moment == "later":
        assert program.stdout.readline() == "ending\n"
        for _ in range(2):
            program.send_signal(signal.SIGINT)
    said, errors = program.communicate(timeout=PATIENCE)
    assert (said, program.returncode) == ("" if moment == "early" else "ended\n", 130)
    happened(f"status {program.returncode}: {errors}")
    assert "Traceback" not in errors and "KeyboardInterrupt" not in errors
    assert errors.endswith("\nInterrupted.\n") and ("Already ending" in errors) == (moment == "later")


def test_a_second_ctrl_c_after_a_while_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handled, ended = interrupts.Interrupts(), list[int]()
    monkeypatch.setattr(interrupts.os, "_exit", ended.append)
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        handled._handle(signal.SIGINT, None)
    handled._handle(signal.SIGINT, None)
    assert ended == [130]


def test_the_handler_of_an_embedding_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(number: int, frame: object) -> None:
        raise AssertionError("no signal is sent")

    monkeypatch.setattr(sys, "argv", ["stagecoach", "--help"])
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert cli.main() == 0
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_help_lists_every_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert re.findall(r"^(\w+):$", said, re.MULTILINE) == ["Run", "Look", "Compare", "Correct", "Keep", "Move"]
    listed = re.findall(r"^  ([\w-]+) +(.*)$", said, re.MULTILINE)
    assert listed == [(name, command.help.splitlines()[0]) for name, command in COMMANDS.items()]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples_that_are_read(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "-h"]) == 0
    page = capsys.readouterr().out
    said = " ".join(page.split())
    assert f"Usage: stagecoach {command}" in page and f"\n{COMMANDS[command].help.splitlines()[0]}\n" in page
    assert COMMANDS[command].examples
    for example in COMMANDS[command].examples:
        assert " ".join(f"stagecoach {command} {example}".split()) in said
        cli.parse([command, *shlex.split(example)])


def test_a_command_that_was_started_without_an_output_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def show() -> None:
        print("said to", "a terminal" if sys.stdout.isatty() else "a file")

    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(cli, "parse", lambda _: show)
    assert cli.main([]) == 0
    sys.stdout.close()


@pytest.mark.parametrize(
    ("argv", "suggestion"),
    [(["logs", "--last", "3"], ""), (["algorithms", "a", "--set", "x"], ""), (["show", "--lst", "3"], "--last")],
)
def test_an_option_is_suggested_only_where_it_is_near(
    argv: list[str], suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    message = capsys.readouterr().err
    assert f"Did you mean {suggestion}?" in message if suggestion else "Did you mean" not in message


def test_ls_lists_the_runs() -> None:
    assert cli.parse(["ls", "--store", "s"]).func is cli.parse(["runs", "--store", "s"]).func
