"""The command line: what is read, what is called, and what a person is told when it fails."""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from configs.errors import ConfigError
from flows import cli
from flows.processes.service import ServiceFailed
from tasks.inference.engine.client import EngineError

NONE = {"name": "", "store": "", "plain": False}
OF_OTHERS = [
    'evaluation.external.url="http://h/v1"',
    'evaluation.external.model="m"',
    "evaluation.retry_errors=2",
]
Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]
QUIET = {"dry_run": False, "as_json": False}
MAINTAIN = {"store": "s", "retention_hours": 168.0, "retain": [], "force": False, **QUIET}
GC = {"store": "", "keep": [], "keep_last": 0, "remove": [], "force": [], "policies": "all", "yes": False, **QUIET}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Put stand-ins in place of the modules that do the work, and return what they are called with."""
    seen: Calls = []
    for module, names in {
        "demo": ["main"],
        "launch": ["start", "resume"],
        "views.show": ["main"],
        "views.evals": ["main"],
        "housekeeping": ["main"],
        "gc": ["main"],
    }.items():
        stand_in = ModuleType(f"flows.{module}")
        noun = module.rpartition(".")[2]
        for name in names:
            setattr(stand_in, name, lambda *args, _to=f"{noun}.{name}", **kwargs: seen.append((_to, args, kwargs)))
        monkeypatch.setitem(sys.modules, f"flows.{module}", stand_in)
    return seen


def test_run_takes_files_and_overrides_in_any_order_with_options_between(calls: Calls) -> None:
    assert cli.main(["run", "demo", "steps=3", "--store", "here", "mine.toml", "--name", "a", "seed=1"]) == 0
    settings = {"name": "a", "store": "here", "plain": False}
    assert calls == [("launch.start", ("train", ["demo", "mine.toml"], ["steps=3", "seed=1"]), settings)]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["sft", "x.toml"], ("launch.start", ("sft", ["x.toml"], []), NONE)),
        (
            ["eval", "demo", "--policy", "a:3"],
            ("launch.start", ("evaluate", ["demo"], ['evaluation.policy="a:3"']), NONE),
        ),
        (
            ["eval", "--url", "http://h/v1", "--model", "m", "--retry-errors", "2"],
            ("launch.start", ("evaluate", [], OF_OTHERS), NONE),
        ),
        (
            ["evals", "a", "b", "--by", "tier", "--output", "x.parquet"],
            ("evals.main", (["a", "b"],), {"store": "", "by": "tier", "output": "x.parquet", "as_json": False}),
        ),
        (["demo", "steps=2"], ("demo.main", (), NONE | {"overrides": ["steps=2"]})),
        (["demo", "--plain"], ("demo.main", (), NONE | {"overrides": [], "plain": True})),
        (["resume"], ("launch.resume", ("latest",), {"overrides": [], "store": "", "plain": False})),
        (
            ["resume", "a", "--store", "s", "--plain"],
            ("launch.resume", ("a",), {"overrides": [], "store": "s", "plain": True}),
        ),
        (["show", "--json", "latest"], ("show.main", ("latest",), {"overrides": [], "store": "", "as_json": True})),
        (["show", "a", "x.y=1"], ("show.main", ("a",), {"overrides": ["x.y=1"], "store": "", "as_json": False})),
        (["maintain", "--store", "s"], ("housekeeping.main", (), MAINTAIN)),
        (
            ["maintain", "--retention-hours", "24", "--retain", "messages=9d", "--force", "--dry-run", "--json"],
            (
                "housekeeping.main",
                (),
                {"store": "", "retention_hours": 24.0, "retain": ["messages=9d"], "force": True, "dry_run": True}
                | {"as_json": True},
            ),
        ),
        (["gc", "--keep", "a", "--keep", "b"], ("gc.main", (), GC | {"keep": ["a", "b"]})),
        (
            ["gc", "--remove", "a", "--force", "b", "--policies", "every:5", "--yes", "--keep-last", "2"],
            ("gc.main", (), GC | {"remove": ["a"], "force": ["b"], "policies": "every:5", "yes": True, "keep_last": 2}),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_command_calls_what_does_the_work(calls: Calls, argv: list[str], expected: tuple[Any, ...]) -> None:
    assert cli.main(argv) == 0
    assert calls == [expected]


def test_a_file_with_an_equals_sign_in_its_name_is_a_file(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1.toml").touch()
    cli.main(["run", "lr=1.toml", "lr=2.toml"])
    assert calls[0][1] == ("train", ["lr=1.toml"], ["lr=2.toml"])


@pytest.mark.parametrize("argv", [[], ["fly"], ["run", "--speed"], ["doctor", "now"], ["maintain", "a=1"]])
def test_usage_errors_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: stagecoach" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["resume", "a", "b"], ["show", "a", "--name", "b"], ["demo", "mine.toml"]])
def test_arguments_that_do_not_fit_together(calls: Calls, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert capsys.readouterr().err.startswith("stagecoach: ")
    assert calls == []


def failing(error: BaseException) -> argparse.Namespace:
    """Return parsed arguments whose command raises `error`."""

    def command(_: argparse.Namespace) -> int:
        raise error

    return argparse.Namespace(command=command)


def run_failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """Run a command that raises `error`."""
    monkeypatch.setattr(cli, "parse", lambda _: failing(error))
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


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_who_has_seen_enough_ends_it_without_a_word(
    lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        said = argparse.Namespace(command=lambda _: print("said\n" * lines))
        monkeypatch.setattr(cli, "parse", lambda _: said)
        assert cli.main([]) == cli.UNREAD
    assert capsys.readouterr().err == ""


def test_another_pipe_that_broke_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokenPipeError, match="of a service"):
        run_failing(monkeypatch, BrokenPipeError("of a service"))


def test_an_interrupt_says_that_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(monkeypatch, KeyboardInterrupt()) == 130
    assert "What is committed is safe" in capsys.readouterr().err


def test_a_full_disk_is_named_whoever_noticed_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_failing(monkeypatch, OSError(28, "No space left on device", "/store/x")) == 2
    assert "the disk is full" in capsys.readouterr().err


def commands() -> list[str]:
    """The names of all commands, out of the help text of their groups."""
    parser = argparse.ArgumentParser()
    added = parser.add_subparsers()
    for group in cli.GROUPS:
        group.add(added)
    return list(added.choices)


@pytest.mark.parametrize("command", commands())
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: stagecoach {command}" in capsys.readouterr().out


def test_every_command_calls_something_that_exists() -> None:
    """The stand-ins above must not hide that the real thing has gone."""
    for module, names in {
        "demo": ["main"],
        "launch": ["start", "resume"],
        "views.show": ["main"],
        "housekeeping": ["main"],
        "gc": ["main"],
    }.items():
        real = importlib.import_module(f"flows.{module}")
        assert all(callable(getattr(real, name)) for name in names)


def loaded_by(*argv: str) -> set[str]:
    """Return the top-level modules that are loaded after a command ran in a fresh interpreter."""
    script = (
        "import sys\nfrom flows import cli\n"
        f"try:\n    cli.main({list(argv)!r})\nexcept SystemExit:\n    pass\n"
        "print('LOADED', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.engine
def test_help_loads_nothing_but_the_standard_library() -> None:
    assert not loaded_by("--help") & {
        "pydantic",
        "numpy",
        "pyarrow",
        "rich",
        "prefect",
        "torch",
        "vllm",
        "transformers",
    }


@pytest.mark.engine
def test_check_loads_neither_engine_nor_prefect() -> None:
    loaded = loaded_by("check", "demo")
    assert "pyarrow" in loaded
    assert not loaded & {"prefect", "torch", "vllm", "transformers", "verifiers", "renderers"}


def test_a_command_that_was_started_without_an_output_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def show(_: argparse.Namespace) -> None:
        print("said to", "a terminal" if sys.stdout.isatty() else "a file")

    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(cli, "parse", lambda _: argparse.Namespace(command=show))
    assert cli.main([]) == 0
    sys.stdout.close()
