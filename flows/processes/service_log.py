"""A bound on the logs of services: one that floods its output must not fill the disk."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

LOG_BYTES = 64 * 2**20
LOOK_SECONDS = 1.0
BLOCK_BYTES = 2**20


def keep_newest(log: Path, most: int) -> bool:
    """Move what a log holds to NAME.1 once it is larger than `most` bytes; return whether it was.

    The newest `most` bytes are kept there, in place of what an earlier call kept. The service goes on writing to the
    same file: it was opened to append, so that it starts again at its beginning. A program that opened it by itself
    (`> /dev/stderr`) goes on where it was and leaves a hole before, which counts for nothing and is not copied. What is
    written between the last look at the file and its emptying is lost.
    """
    try:
        written = _written(log)
    except FileNotFoundError:
        return False
    if sum(end - begin for begin, end in written) <= most:
        return False
    begin, end = written[-1]
    aside = log.with_name(f"{log.name}.1")
    kept = "is in " + aside.name
    try:
        _copy(log, aside, max(begin, end - most), 2 * most)
    except OSError as problem:  # a full disk: the reason to empty the log, and none to keep it
        kept = f"is lost: {problem}"
    os.truncate(log, 0)
    with log.open("ab") as file:
        file.write(f"--- the log was larger than {most} bytes: what it held {kept}\n".encode())
    return True


def _written(log: Path) -> list[tuple[int, int]]:
    """Return where a file holds data, as begins and ends in bytes; its holes are between them."""
    found: list[tuple[int, int]] = []
    with log.open("rb") as file:
        size, at = file.seek(0, os.SEEK_END), 0
        while at < size:
            try:
                begin = file.seek(at, os.SEEK_DATA)
                at = file.seek(begin, os.SEEK_HOLE)
            except OSError as problem:
                # There is a hole to the end, or this file system does not tell: then all of it counts.
                return found if problem.errno == errno.ENXIO else [(0, size)]
            found.append((begin, at))
    return found


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


class LogKeeper:
    """A thread that looks at the logs every second."""

    def __init__(self, logs: Callable[[], Iterable[tuple[Path, int]]]) -> None:
        self._logs = logs
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs of services", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        for log, most in self._logs():
            try:
                keep_newest(log, most)
            except OSError:
                logging.getLogger(__name__).warning("cannot bound the log %s", log, exc_info=True)

    def close(self) -> None:
        """Look once more and end; the services have ended before."""
        self._closed.set()
        self._thread.join()
        self._look()
