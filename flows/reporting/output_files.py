"""Writes files that people ask for: beside their place, put there whole, over no other and never in a store."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from storage.errors import border
from storage.roots import synchronise
from storage.store import enclosing_store

MODEL_FILE = "config.json"
"""What tells a directory of weights, which may be replaced, from any other."""


STREAMS = ("/dev/std", "/dev/fd/", "/proc/self/fd/")


class OutputRefused(ValueError):
    """A file may not be written where it was to be."""


def check_output(target: Path, force: bool = False) -> None:
    """Raise OutputRefused where nothing may be written: in a store, or over what is there, unless with `force`."""
    if _is_stream(target):
        return
    if store := enclosing_store(target):
        problem = f"is inside the store {store}, which only Stagecoach writes"
    elif os.path.lexists(target) and not force:
        problem = "is there already; --force replaces a file"
    elif target.is_dir() and any(target.iterdir()) and not (target / MODEL_FILE).is_file():
        problem = f"is a directory without a {MODEL_FILE}, so it holds something else than weights, in spite of --force"
    else:
        return
    raise OutputRefused(f"{target} {problem}. Nothing was written or removed. Name another place.")


def write_whole(target: Path, write: Callable[[Path], object], force: bool = False) -> None:
    """Have `write` make a file or directory at a path beside `target`, then put it in its place.

    What is there is replaced only with `force`, and a directory only where it is one of weights; a device or a pipe is
    written to. Raises OutputRefused before anything is written, NoSpace and StoreUnavailable when writing fails; the
    draft is then gone.
    """
    with border(f"writing {target.name}", str(target), "what was there before, and the store"):
        check_output(target, force)
        if _is_stream(target):
            write(target)
            return
        draft, old = (target.parent / f".{target.name[:80]}.{uuid4().hex}" for _ in range(2))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(draft)
            # To the disk before it has its name: after a loss of power what has the name is whole.
            for path in (*draft.rglob("*"), draft) if draft.is_dir() else (draft,):
                synchronise(path)
            if draft.is_dir():
                # Out of the way first and removed last: a directory cannot be replaced in one step.
                if force and target.exists():
                    os.rename(target, old)
                os.rename(draft, target)  # fails where a directory that is not empty has come meanwhile
                _remove(old)
            elif force:
                os.replace(draft, target)
            else:
                os.link(draft, target)  # a rename would replace what somebody else has put there meanwhile
            synchronise(target.parent)
        except FileExistsError as error:
            raise OutputRefused(f"{target} has come into being meanwhile. It was left as it is.") from error
        finally:
            _remove(draft)


def _is_stream(target: Path) -> bool:
    """Return whether a path is a device or a pipe, such as /dev/stdout: there is nothing that could be replaced."""
    # Behind /dev/stdout may be a file, which is the shell's to open.
    return target.exists() and (str(target).startswith(STREAMS) or not (target.is_file() or target.is_dir()))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
