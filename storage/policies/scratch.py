"""Scratch directories: where weights are written before they are a policy, gone with the process that wanted them.

Each is locked by its process for as long as it is in use. The system drops the lock when the process dies, however it
does, and whoever makes the next scratch directory removes those that nobody holds.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from uuid import uuid4

from storage.roots import make_directory


class Scratches:
    """The scratch directories below one directory; safe to share between threads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._held: dict[Path, int] = {}
        self._lock = Lock()

    def make(self, name: str) -> Path:
        """Make a new empty directory whose name begins with `name`, and remove those whose processes are gone."""
        with self._lock, self._alone():
            self._sweep()
            path = self.directory / f"{name}-{uuid4().hex[:12]}"
            make_directory(path)
            if (held := _hold(path)) is not None:
                self._held[path] = held
            return path

    def discard(self, path: Path) -> None:
        """Remove one of these directories, or forget one that was moved away; any other is left alone."""
        if path.parent != self.directory:
            return
        shutil.rmtree(path, ignore_errors=True)
        with self._lock:
            held = self._held.pop(path, None)
        if held is not None:
            os.close(held)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from sweeping what is made and not held yet."""
        make_directory(self.directory)
        door = _hold(self.directory, wait=True)
        try:
            yield
        finally:
            if door is not None:
                os.close(door)

    def _sweep(self) -> None:
        for path in self.directory.iterdir():
            if path.is_dir() and (unheld := _hold(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(unheld)


def _hold(path: Path, wait: bool = False) -> int | None:
    """Lock a directory and return the descriptor that keeps it; None where another holds it or locks do not work.

    On a file system without locks nothing is swept here: housekeeping removes what is older than a day.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
