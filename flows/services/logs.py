"""Logs of services: a bound on their size, so that no flood fills the disk, and their ends without secrets."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

Variables = Mapping[str, str]
"""Environment variables of a process."""
LOG_BYTES = 64 * 2**20
# A look costs little, and what a flood writes in a second still fits on a disk.
LOOK_SECONDS = 1.0
BLOCK_BYTES = 2**20
SHOWN_LINES = 20
SHOWN_CHARACTERS = 500
"""Longest line that is shown whole: a message is read by people, and one line may be as long as a log."""
HEADING = "--- "
"""Begins the line that is written before each start."""
_READ_BYTES = 64 * 1024
# As an interpreter prints it, or as vLLM logs it: (EngineCore pid=1) ERROR 01-31 12:00:00 [core.py:1] ValueError: no
_ERROR = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^]]*] )?((?:\w+\.)*\w*(?:Error|Exception): .+)")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
# Shorter ones stand in ordinary words, which would be crossed out.
_SHORTEST_SECRET = 8


def keep_newest(log: Path, most: int) -> bool:
    """Move what a log holds to NAME.1 once it is larger than `most` bytes; return whether it was.

    The newest `most` bytes are kept there, in place of what an earlier call kept. The service continues to write to the
    same file: it was opened to append, so that it starts again at its beginning. A program that opened it by itself
    (`> /dev/stderr`) continues at its old offset and leaves a hole before it, which takes no disk and does not count.
    What is written between the copy and the emptying is lost.
    """
    try:
        size, on_disk = (status := log.stat()).st_size, status.st_blocks * 512
    except FileNotFoundError:
        return False
    if min(size, on_disk) <= most:
        return False
    aside = log.with_name(f"{log.name}.1")
    kept = "is in " + aside.name
    try:
        _copy(log, aside, max(0, size - most), 2 * most)
    except OSError as problem:  # a full disk: the reason to empty the log, and none to keep it
        kept = f"is lost: {problem}"
    # In place, as the service holds the file open: renamed, it would go on growing out of sight.
    os.truncate(log, 0)
    with log.open("ab") as file:
        file.write(f"{HEADING}the log was larger than {most} bytes: what it held {kept}\n".encode())
    return True


def _copy(log: Path, aside: Path, start: int, most: int) -> None:
    """Copy from `start` on, at most so many bytes: a flood may be faster than its copy."""
    partial = aside.with_name(f"{aside.name}.partial")
    try:
        with log.open("rb") as source, partial.open("wb") as target:
            source.seek(start)
            while target.tell() < most and (block := source.read(BLOCK_BYTES)):
                target.write(block)
        partial.replace(aside)
    finally:
        partial.unlink(missing_ok=True)


class NewLines:
    """What a log gets from now on, a whole line at a time."""

    def __init__(self, log: Path, env: Variables) -> None:
        """`env` has the secrets that are left out."""
        self._log, self._hidden = log, secrets(env)
        self._read = log.stat().st_size if log.exists() else 0

    def take(self) -> list[str]:
        """Return the lines since the last call; of a flood its last ones, after a line that says so."""
        try:
            size = self._log.stat().st_size
            begin = self._read if self._read <= size else 0  # it was emptied meanwhile
            skipped = max(0, size - begin - _READ_BYTES)
            with self._log.open("rb") as file:
                file.seek(begin + skipped)
                whole, end, _ = file.read(size - begin - skipped).rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read = begin + skipped + len(whole) + len(end)
        lines = [_shorten(line) for line in _hide(whole.decode(errors="replace"), self._hidden).splitlines()]
        # The first of a flood may begin in the middle of a secret.
        return [f"[{skipped} bytes are in {self._log} alone]", *lines[1:]] if skipped else lines


def last_lines(log: Path, env: Variables, count: int = SHOWN_LINES) -> list[str]:
    """Return the last lines of a log, with the secrets of `env` left out and long lines without their middle."""
    return [_shorten(line) for line in _end_of(log, env)[-count:]]


def last_words(log: Path, env: Variables) -> str:
    """Return the last line of a log in brackets, after a blank; nothing where the service has not written any."""
    (line,) = last_lines(log, env, 1) or ("",)
    return f" ({line})" if line and not line.startswith(HEADING) else ""


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
            text = _hide(file.read().decode(errors="replace"), hidden)
    except FileNotFoundError:
        return []
    if begin:
        text = text[max(map(len, hidden), default=0) :]  # a secret may have been cut there, and so was not found
    return text.splitlines()


def _hide(text: str, hidden: Iterable[str]) -> str:
    for secret in hidden:
        text = text.replace(secret, "***")
    return text


def _shorten(line: str) -> str:
    if len(line) <= SHOWN_CHARACTERS:
        return line
    half = SHOWN_CHARACTERS // 2
    return f"{line[:half]} [{len(line) - 2 * half} characters] {line[-half:]}"


def secrets(env: Variables) -> list[str]:
    """Return the values that must not be shown: those of variables named like secrets, unless too short to be one."""
    return [value for name, value in env.items() if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET]
