"""What the documents tell people to type exists: make targets, commands, presets and settings."""

import inspect
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest

from configs.layers import presets
from configs.load import load
from flows import cli
from flows.cli.arguments import split_items

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)


def typed(document: Path) -> list[str]:
    """Return the command lines of a document's shell blocks, without comments."""
    text = "".join(BLOCK.findall(document.read_text(encoding="utf-8")))
    return [line.partition(" #")[0].strip() for line in text.splitlines() if line.strip() and line[0] != "#"]


LINES = [(document, line) for document in DOCUMENTS for line in typed(document)]
COMMANDS = [shlex.split(line)[1:] for _, line in LINES if line.split()[0] == "stagecoach"]
TARGETS = sorted({line.split()[1] for _, line in LINES if line.startswith("make ")})


@pytest.mark.parametrize("target", TARGETS)
def test_make_targets_exist(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_are_understood(arguments: list[str]) -> None:
    command = cli.parse(arguments)
    assert isinstance(command, partial)
    takes_items = "items" in inspect.signature(command.func).parameters
    files, overrides = split_items(command.args if takes_items else ())
    files = [file for file in files if arguments[0] in ("run", "sft", "eval", "check") and file in presets()]
    load(files or ["demo"], [*overrides, *command.keywords.get("overrides", ())])


def test_there_is_something_to_look_at() -> None:
    assert {"demo", "test"} <= set(TARGETS)
    assert {"run", "show", "check", "doctor"} <= {arguments[0] for arguments in COMMANDS}
