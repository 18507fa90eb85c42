"""Named moments in the life of a run, seen by wrapping the product's functions; at chosen ones something is killed."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import storage.policies.store
from storage.ledger import Ledger
from storage.policies.store import Policies
from storage.refs import Entry
from storage.store import Store
from tasks.learner import wire

COMMIT_SECONDS = 120.0


def durable_line(path: Path, content: Any) -> None:
    """Append a line of JSON that is on the disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, (json.dumps(content) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def kill_self() -> None:
    """End this process as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Moments:
    """Counts moments by name, notes each, and does what is planned for it, with a receipt."""

    directory: Path
    plans: Mapping[str, Callable[[], None]]
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    parts: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def happen(self, moment: str) -> None:
        """Note that a moment has come; the n-th of a name is called `name #n`, the first just `name`."""
        with self.lock:
            self.counts[moment] += 1
            count = self.counts[moment]
            name = moment if count == 1 else f"{moment} #{count}"
            durable_line(self.directory / "moments.jsonl", name)
            if name in self.plans:
                durable_line(self.directory / "receipt.jsonl", {"moment": name, "pid": os.getpid()})
                self.plans[name]()

    def handed_over(self, group_id: str) -> None:
        """Wait until a group is committed, so that every group is a part of its own and its commit a moment."""
        self.happen(f"handed over {group_id}")
        assert self.parts.acquire(timeout=COMMIT_SECONDS), "a group that was handed over was never committed"

    def watch(self) -> None:
        """Wrap the functions of the product in which a run can be caught."""
        self._wrap(Ledger, "commit", lambda ledger, entry: f"commit {_work(entry)}", self._committed)
        self._wrap(Ledger, "commit_all", lambda ledger, entries: "commit of several" if len(entries) > 1 else "")
        self._wrap(Store, "append", lambda store, table, rows, **slice_: f"append {table} {slice_['step']}")
        self._wrap(Policies, "publish", lambda *_: "publish")
        self._wrap(storage.policies.store, "synchronise", _sync)
        self._wrap(wire, "send", _request)

    def _committed(self, ledger: Ledger, entry: Entry) -> None:
        if entry.part:
            self.parts.release()

    def _wrap(
        self,
        owner: Any,
        name: str,
        describe: Callable[..., str],
        afterwards: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        wrapped = getattr(owner, name)

        @wraps(wrapped)
        def call(*arguments: Any, **keywords: Any) -> Any:
            moment = describe(*arguments, **keywords)
            if moment:
                self.happen(f"before {moment}")
            result = wrapped(*arguments, **keywords)
            if moment:
                self.happen(f"after {moment}")
            afterwards(*arguments, **keywords)
            return result

        setattr(owner, name, call)


def _work(entry: Entry) -> str:
    return f"{entry.stage} {entry.step}{' part' if entry.part else ''}"


def _sync(path: Path) -> str:
    """Weights are complete, manifest included, once this is called for their directory, and renamed after it."""
    return "rename of weights" if Path(path).parent.name == ".scratch" else ""


def _request(connection: Any, header: dict[str, Any], table: Any = None) -> str:
    """A request is under way in the learner's process once it is sent."""
    return f"request {header['request']}" if header.get("request") == "train" else ""
