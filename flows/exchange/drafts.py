"""Drafts: a file or directory for others is written beside its place and put there whole, or not at all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from storage.errors import border
from storage.roots import synchronise

MODEL_FILE = "config.json"
"""What tells a directory of weights, which may be replaced, from any other."""


class ExportRefused(ValueError):
    """Something is in the way of what was to be written, or there is nothing to write."""


def write_whole(target: Path, write: Callable[[Path], None], force: bool = False) -> None:
    """Have `write` make a file or directory at a path beside `target`, then put it in its place.

    What is there is replaced only with `force`, and a directory only where it is one of weights. Raises ExportRefused
    before anything is written, NoSpace and StoreUnavailable when writing fails; the draft is then gone.
    """
    _require_room(target, force)
    draft = target.parent / f".{target.name}.{uuid4().hex}"
    with border(f"writing {target.name}", str(target), "what was there before, and the store"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(draft)
            for path in (*draft.rglob("*"), draft) if draft.is_dir() else (draft,):
                synchronise(path)
            _put(draft, target, force)
            synchronise(target.parent)
        finally:
            _remove(draft)


def _require_room(target: Path, force: bool) -> None:
    if not os.path.lexists(target):
        return
    if not force:
        raise ExportRefused(
            f"{target} is there already. Nothing was written. Name another place, or replace it with --force."
        )
    if target.is_dir() and any(target.iterdir()) and not (target / MODEL_FILE).is_file():
        raise ExportRefused(
            f"{target} is a directory without a {MODEL_FILE}, so it holds something else than weights. Nothing was "
            "written or removed, in spite of --force. Name another place."
        )


def _put(draft: Path, target: Path, force: bool) -> None:
    if draft.is_dir():
        old = target.parent / f".{target.name}.{uuid4().hex}"
        if force and target.exists():
            os.rename(target, old)
        os.rename(draft, target)  # fails where a directory that is not empty has come meanwhile
        _remove(old)
    elif force:
        os.replace(draft, target)
    else:
        _put_new(draft, target)


def _put_new(draft: Path, target: Path) -> None:
    try:
        os.link(draft, target)  # a rename would replace what somebody else has put there meanwhile
    except FileExistsError as error:
        raise ExportRefused(f"{target} has come into being meanwhile. It was left as it is.") from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
