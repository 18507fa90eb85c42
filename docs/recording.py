"""Records commands in a terminal as pictures, for README: `make pictures` (tests/browser/pictures.py) calls it."""

import io
import os
import pty
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from string import hexdigits
from typing import Any

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS, ROWS = 100, 36
SECONDS = 0.5
"""Between two screens of a command at work."""


def screens(command: str, directory: Path) -> Iterator[str]:
    """Yield what a terminal shows of a command at work, as SVG: the screens that differ, and the last one.

    Raises CalledProcessError for a command that fails.
    """
    screen = pyte.Screen(COLUMNS, ROWS)
    stream, shown, before = pyte.ByteStream(screen), time.monotonic(), ""
    stream.feed(f"$ {command}\r\n".encode())
    for output in _output(command, directory):
        stream.feed(output)
        if time.monotonic() > shown + SECONDS:
            shown, picture = time.monotonic(), _drawn(screen)
            if picture != before:
                yield picture
            before = picture
    yield _drawn(screen)


def _output(command: str, directory: Path) -> Iterator[bytes]:
    """Yield what a command prints in a pseudo-terminal. Raises CalledProcessError."""
    terminal, its_side = pty.openpty()
    variables = os.environ | {"COLUMNS": f"{COLUMNS}", "LINES": f"{ROWS}", "TERM": "xterm-256color"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), its_side)
    with subprocess.Popen(shlex.split(command), cwd=directory, env=variables, **streams) as process:
        os.close(its_side)
        try:
            while output := os.read(terminal, 65_536):
                yield output
        except OSError:  # the end of a pseudo-terminal
            pass
    os.close(terminal)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _drawn(screen: Any) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for row in range(ROWS):
        text = Text(no_wrap=True)
        for cell in (screen.buffer[row][column] for column in range(COLUMNS)):
            text.append(cell.data, Style(color=_color(cell.fg), bold=cell.bold))
        console.print(text)
    return console.export_svg(title="stagecoach", theme=MONOKAI, unique_id="screen")


def _color(name: str) -> str | None:
    """Return rich's name of a colour of pyte, whose yellow is brown; None for the terminal's own."""
    if set(name) <= set(hexdigits):
        return f"#{name}"
    return None if name == "default" else name.replace("brown", "yellow").replace("bright", "bright_")
