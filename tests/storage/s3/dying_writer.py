"""A writer that kills itself: `python -m tests.storage.s3.dying_writer ROOT MOMENT`.

Moments: `before` or `after` a commit to a table's log (`before messages`), `during upload` of a policy's second file,
`before manifest`, `after manifest`. It computes the step that `tests.storage.s3.test_kills` asks for.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from storage.delta.table import StoredTable
from storage.roots import Root
from storage.store import Store, open_store
from tests.fixtures.rows import append, entry


def main(url: str, moment: str) -> None:
    """Do all the work, unless the moment comes first."""
    store = open_store(url)
    plant(moment)
    commit(store, "first")
    publish(store, "first")


def commit(store: Store, attempt: str) -> None:
    """Commit one step as a stage does: its rows, then its row in the ledger."""
    if store.ledger.find("key") is None:
        piece = append(store, 3, key="key", attempt=attempt)
        store.ledger.commit(entry("key", outputs=(piece,), attempt=attempt))


def publish(store: Store, attempt: str) -> None:
    """Publish one policy of three files."""
    scratch = store.policies.scratch("policy")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        Path(scratch, name).write_bytes(f"{name} of {attempt if name == 'config.json' else 'anybody'}".encode() * 9)
    store.policies.publish(scratch, "policy")


def plant(moment: str) -> None:
    """Replace what happens at the moment by SIGKILL before, during or after it."""
    when, _, what = moment.partition(" ")
    push, create, copy = StoredTable._write_commit, Root.create, shutil.copyfileobj
    copied: list[int] = []

    def dying_push(self: StoredTable, *arguments: Any) -> None:
        die(self.name == what and when == "before")
        push(self, *arguments)
        die(self.name == what and when == "after")

    def dying_create(self: Root, path: str, data: bytes) -> bool:
        die(moment == "before manifest" and path.endswith("manifest.json"))
        done = create(self, path, data)
        die(moment == "after manifest" and path.endswith("manifest.json"))
        return done

    def dying_copy(read: Any, write: Any, length: int = 0) -> None:
        if moment == "during upload" and copied:
            write.write(read.read(20))
            die(True)
        copy(read, write, length)
        copied.append(1)

    StoredTable._write_commit, Root.create, shutil.copyfileobj = dying_push, dying_create, dying_copy  # type: ignore


def die(now: bool) -> None:
    """Die by SIGKILL if it is time."""
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
