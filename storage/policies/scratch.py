"""Scratch directories: where weights are written before they are a policy; they go with the process that made them.

Each is locked by its process for as long as it is in use. The system drops the lock when the process dies, however it
does, and the next process that makes a scratch directory removes those without a lock.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from uuid import uuid4

from storage.errors import StoreError
from storage.roots import make_directory, make_private_directory


class ScratchDirectories:
    """The scratch directories below one directory; safe to share between threads.

    `private`, the directory or a parent, lies in a place that users share: see `make_private_directory`.
    """

    def __init__(self, directory: Path, private: Path | None = None) -> None:
        self.directory = directory
        self._private = private
        self._locks: dict[Path, int] = {}
        self._lock = Lock()

    def make(self, name: str) -> Path:
        """Make a new empty directory whose name begins with `name`, and remove those whose processes are gone.

        Raises StoreError for a place that another user, or a link, could exchange.
        """
        with self._lock, self._exclusive():
            self._remove_abandoned()
            path = self.directory / f"{name}-{uuid4().hex[:12]}"
            make_directory(path)
            # The lock is held as long as its descriptor is open, and no process can keep one when it is dead.
            if (descriptor := _lock_directory(path)) is not None:
                self._locks[path] = descriptor
            return path

    def discard(self, path: Path) -> None:
        """Remove one of these directories, or forget one that was moved away; any other is left alone."""
        if path.parent != self.directory:
            return
        shutil.rmtree(path, ignore_errors=True)
        with self._lock:
            descriptor = self._locks.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other processes from removing a directory between its making and its lock."""
        if self._private is not None:
            make_private_directory(self._private)
        if self.directory.is_symlink():
            what, advice = "a directory in which what is left is removed is a symbolic link", "remove the link"
            raise StoreError(what, str(self.directory), "nothing was removed", advice)
        make_directory(self.directory)
        descriptor = _lock_directory(self.directory, wait=True)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _remove_abandoned(self) -> None:
        for path in self.directory.iterdir():
            if path.is_dir() and (descriptor := _lock_directory(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)


def _lock_directory(path: Path, wait: bool = False) -> int | None:
    """Lock a directory and return the descriptor of the lock; None where another has it or locks do not work.

    On a file system without locks nothing is removed: what processes that died left there goes by hand.
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
