"""A store with finished work in it, which can be made to look older."""

import os
import time
from pathlib import Path

from storage.refs import Slice
from storage.store import Store
from tests.fixtures.rows import entry, messages


def fill(store: Store, count: int, run: str = "run") -> list[Slice]:
    """Finished work of so many steps, two slices each, the second under its own attempt."""
    pieces = []
    for step in range(count):
        key = f"{run}-{step}"
        made = [
            store.append("messages", messages(2 + n), run=run, step=step, key=key, attempt=f"{key}-{n}") for n in (0, 1)
        ]
        store.ledger.commit(entry(key, run=run, outputs=tuple(made), step=step))
        pieces += made
    return pieces


def age(root: Path, hours: float) -> None:
    """Make every file and directory of a store look older."""
    then = time.time() - hours * 3600
    for path in root.rglob("*"):
        os.utime(path, (then, then))
