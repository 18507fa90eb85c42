"""Logs of services: a bound on their size, so that no flood fills the disk, and their ends without secrets."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

Variables = Mapping[str, str]
"""Environment variables of a process."""
LOG_BYTES = 64 * 2**20
# A look costs little, and what a flood writes in a second still fits on a disk.
LOOK_SECONDS = 1.0
SHOWN_LINES = 20
SHOWN_CHARACTERS = 500
"""Longest line that is shown whole: a message is read by people, and one line may be as long as a log."""
HEADING = "--- "
"""Begins the line that is written before each start."""
_READ_BYTES = 64 * 1024
# As an interpreter prints it, or as vLLM logs it: (EngineCore pid=1) ERROR 01-31 12:00:00 [core.py:1] ValueError: no
_ERROR = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^]]*] )?((?:\w+\.)*\w*(?:Error|Exception): .+|MemoryError$)")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
# Shorter ones stand in ordinary words, which would be crossed out.
_SHORTEST_SECRET = 8


def keep_newest(log: Path, most: int) -> None:
    """Move what a log holds to NAME.1 once it is larger than `most` bytes.

    The newest `most` bytes are kept there, in place of what an earlier call kept. The service continues to write to the
    same file: it was opened to append, so that it starts again at its beginning. What is written between the copy and
    the emptying is lost.
    """
    size = log.stat().st_size if log.exists() else 0
    if size <= most:
        return
    aside = log.with_name(f"{log.name}.1")
    kept = "is in " + aside.name
    try:
        with log.open("rb") as source, aside.open("wb") as target:
            source.seek(size - most)
            target.write(source.read(2 * most))  # a flood may be faster than its copy
    except OSError as problem:  # a full disk: the reason to empty the log, and none to keep it
        kept = f"is lost: {problem}"
    # In place, as the service holds the file open: renamed, it would go on growing out of sight.
    os.truncate(log, 0)
    with log.open("ab") as file:
        file.write(f"{HEADING}the log was larger than {most} bytes: what it held {kept}\n".encode())


def last_lines(log: Path, env: Variables, count: int = SHOWN_LINES) -> list[str]:
    """Return the last lines of a log, with the secrets of `env` left out and long lines without their middle."""
    return [_shorten(line) for line in _end_of(log, env)[-count:]]


def first_error(log: Path, env: Variables) -> str:
    """Return the first line since the service was last started that ends a traceback; empty where there is none.

    Of a program with several processes it says the cause, where the last lines only say that one of them is gone.
    """
    lines = _end_of(log, env)
    begin = max((number for number, line in enumerate(lines) if line.startswith(HEADING)), default=0)
    found = (match[1] for line in lines[begin:] if (match := _ERROR.match(line)))
    return _shorten(next(found, ""))


def _end_of(log: Path, env: Variables) -> list[str]:
    hidden = secrets(env)
    try:
        with log.open("rb") as file:
            # A log may have grown to its bound.
            begin = max(0, log.stat().st_size - _READ_BYTES)
            file.seek(begin)
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    for secret in hidden:
        text = text.replace(secret, "***")
    if begin:
        text = text[max(map(len, hidden), default=0) :]  # a secret may have been cut there, and so was not found
    return text.splitlines()


def _shorten(line: str) -> str:
    if len(line) <= SHOWN_CHARACTERS:
        return line
    half = SHOWN_CHARACTERS // 2
    return f"{line[:half]} [{len(line) - 2 * half} characters] {line[-half:]}"


def secrets(env: Variables) -> list[str]:
    """Return the values that must not be shown: those of variables named like secrets, unless too short to be one."""
    return [value for name, value in env.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET]
