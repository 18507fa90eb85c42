"""The command line: how arguments are read, what is called, and what is printed when it fails."""

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
from unittest.mock import Mock

import pytest

from configs.errors import ConfigError
from flows import cli
from flows.cli import run as commands
from flows.cli.commands import COMMANDS
from flows.services.process import ServiceFailed
from storage.store import open_store
from tests.fixtures.commands import cases
from tests.fixtures.faults import happened
from tests.fixtures.programs import environment
from tests.fixtures.waiting import PATIENCE


@cases(__file__, "started")
def test_runs_are_started_with_files_and_overrides_in_any_order(argv, kind, files, overrides, tmp_path, monkeypatch):
    start = Mock(return_value=0)
    monkeypatch.setattr(commands, "start", start)
    monkeypatch.chdir(tmp_path)
    Path("lr=1.toml").touch()  # a file that is there is one, whatever its name
    assert cli.main([*argv.split(), "--name", "a", "--store", "s"]) == 0
    start.assert_called_once_with(kind, files, overrides, name="a", store="s", plain="--plain" in argv)


@cases(__file__, "refused")
def test_arguments_that_are_refused(argv, words, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, message = call(*argv.split())
    assert status == 2 and message.startswith("stagecoach: ") and words in message
    assert [*tmp_path.iterdir()] == []


@cases(__file__, "options")
def test_options_are_read(argv, options):
    command = cli.parse(argv.split())
    assert isinstance(command, partial)
    found = {name: [*value] if isinstance(value, tuple) else value for name, value in command.keywords.items()}
    assert found == options


@pytest.mark.parametrize(
    ("argv", "suggestion"),
    [("runs --lines 3", ""), ("evals a --set x", ""), ("show --lst 3", "--last")],
)
def test_an_option_is_suggested_only_where_it_is_near(argv, suggestion, call):
    message = call(*argv.split())[1]
    assert f"Did you mean {suggestion}?" in message if suggestion else "Did you mean" not in message


def test_ls_lists_the_runs():
    assert cli.parse(["ls", "--store", "s"]).func is cli.parse(["runs", "--store", "s"]).func


def fail(monkeypatch, error, **arguments):
    """Run a command that raises `error`."""
    monkeypatch.setattr(cli, "parse", lambda _: partial(Mock(side_effect=error), **arguments))
    return cli.main([])


def disk_error(number):
    return OSError(number, os.strerror(number), "/store/x")


def caused_by(cause):
    error = RuntimeError("of a library")
    error.__cause__ = cause
    return error


FULL = "no space left\n  Where: /store/x\n"
READ_ONLY = "the disk is read-only\n  Where: /store/x\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError(["a.b: wrong"]), ""),
        (ServiceFailed("it did not start"), ""),
        (disk_error(errno.ENOSPC), FULL),
        (disk_error(errno.EDQUOT), FULL),
        (disk_error(errno.EROFS), READ_ONLY),
        (caused_by(disk_error(errno.EROFS)), READ_ONLY),
        (sqlite3.OperationalError("database or disk is full"), "no space left"),
        (sqlite3.OperationalError("attempt to write a readonly database"), "the disk is read-only"),
        (ServiceFailed("it ended; its log: No space left on device"), "it ended; its log"),
    ],
)
def test_errors_for_people_are_one_message_without_a_traceback(error, words, monkeypatch, capsys):
    error.add_note("all earlier stages are safe")
    assert fail(monkeypatch, error) == 2
    message = capsys.readouterr().err
    if words:
        assert words in message and "Safe: everything that the ledger names" in message
        assert "then run the same again" in message
    else:
        assert message == f"stagecoach: {error}\nall earlier stages are safe\n"


@pytest.mark.parametrize(
    "error", [ValueError("of a library"), AssertionError("ours"), KeyError("x"), BrokenPipeError("of a service")]
)
def test_faults_keep_their_traceback(error, monkeypatch):
    with pytest.raises(type(error)):
        fail(monkeypatch, error)


def test_the_search_for_damage_is_announced_and_can_be_interrupted(tmp_path, monkeypatch, capsys):
    store = {"store": str(open_store(tmp_path / "store").root.address)}
    announced = pytest.warns(UserWarning, match="looking through all of its files for damage.* Ctrl-C ends it")
    with announced, pytest.raises(KeyError):
        fail(monkeypatch, KeyError("x"), **store)
    monkeypatch.setattr("storage.read.damage.damaged_files", Mock(side_effect=KeyboardInterrupt))
    with pytest.warns(UserWarning):
        assert fail(monkeypatch, KeyError("x"), **store) == 130
    message = capsys.readouterr().err
    assert "Interrupted while looking for damage. Before that: KeyError: 'x'" in message


@pytest.mark.parametrize("lines", [1, 100_000], ids=["a line", "more than a pipe holds"])
def test_a_reader_that_closes_the_output_ends_the_command_silently(lines, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(cli, "parse", lambda _: partial(print, "said\n" * lines))
        assert cli.main(["runs"]) == cli.UNREAD
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("argv", ["--help", "run --help", "--version"])
def test_help_that_is_not_read_to_its_end_ends_silently(argv):
    # In a process of its own: rich's console is silent for good once its output is closed.
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "flows.cli", *argv.split()]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (cli.UNREAD, "")


@pytest.mark.parametrize(
    ("notes", "printed"),
    [
        ([], "\nInterrupted.\n"),
        (["Go on with: stagecoach resume a"], "\nInterrupted. Go on with: stagecoach resume a\n"),
    ],
)
def test_an_interrupt_gives_advice_only_if_something_can_be_resumed(notes, printed, monkeypatch, capsys):
    interrupt = KeyboardInterrupt()
    for note in notes:
        interrupt.add_note(note)
    assert fail(monkeypatch, interrupt) == 130
    assert capsys.readouterr().err == printed


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
def test_ctrl_c_while_the_program_starts_and_pressed_three_times_leaves_no_traceback(moment):
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


def test_the_handler_of_an_embedding_program_stays(monkeypatch):
    handler = Mock()
    monkeypatch.setattr(sys, "argv", ["stagecoach", "--help"])
    previous = signal.signal(signal.SIGINT, handler)
    try:
        assert cli.main() == 0
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_help_lists_every_command_in_its_group(call):
    status, page = call("--help")
    assert status == 0 and max(map(len, page.splitlines())) <= 80
    assert re.findall(r"^(\w+):$", page, re.MULTILINE) == ["Run", "Look", "Compare", "Correct", "Keep", "Move"]
    listed = re.findall(r"^  ([\w-]+) +(.*)$", page, re.MULTILINE)
    assert listed == [(name, command.help.splitlines()[0]) for name, command in COMMANDS.items()]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_examples_that_are_read(command, call):
    page, text = call(command, "-h")[1], COMMANDS[command].help
    assert f"Usage: stagecoach {command}" in page and f"\n{text.splitlines()[0]}\n" in page
    examples = re.findall(r"^  stagecoach (.*)", text, re.MULTILINE)
    assert examples
    for example in examples:
        assert f"stagecoach {example}" in " ".join(page.split())
        cli.parse(shlex.split(example))
