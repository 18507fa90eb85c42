"""What a run works with: its store, name and config, and how its stage results are keyed, found, written and read."""

import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from cachetools import LRUCache

from configs.run import RunConfig, View
from configs.services import MEMORY_RATIO
from storage.keys import work_key
from storage.refs import Entry, Slice
from storage.schemas.stage_tables import TABLES
from storage.store import Store, open_store
from storage.turns import TurnCache
from tasks.runtime.commit_queue import LINGER_SECONDS, CommitQueue
from tasks.runtime.refs import Ref
from tasks.runtime.stored_rows import StoredRows

# The tables of some steps: replays of one run read the same ones once for every setting.
MAX_BYTES = 256 << 20
LEAST_BYTES = 1 << 18
"""What a table counts for at least: beside its values one of 32 columns has 40 kB of pointers and schemas."""
SMALL_BYTES = 1 << 23
"""A file of more bytes is not kept in memory by who reads it in parts."""
LEDGER_SECONDS = 0.1
"""How old what is known of the ledger may be when it is decided what is still to be computed."""


_RECENT = LRUCache[tuple[str, str], pa.Table](MAX_BYTES, getsizeof=lambda rows: max(rows.nbytes, LEAST_BYTES))
"""Rows of slices by table and digest, of all runs of this process: one replay after another reads the same ones."""
_RECENT_LOCK = threading.Lock()


def keep_recent(piece: Slice, rows: pa.Table) -> None:
    """Keep rows of a slice for who reads them next; the least recently used go first."""
    with _RECENT_LOCK, suppress(ValueError):  # rows larger than the whole cache
        _RECENT[piece.table, piece.digest] = rows


class KeyedStage(Protocol):
    """The properties of a stage that are in its keys."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def sections(self) -> tuple[str, ...]: ...


class RunContext:
    """Where a run works: its store, its name, its config and the versions of what computes."""

    def __init__(self, store: Store, run: str, config: RunConfig, versions: Mapping[str, str]) -> None:
        self.store = store
        self.run = run
        self.config = config
        self.versions = dict(versions)
        self.key = StageKeys(config)
        self._queue: CommitQueue | None = None
        self.turns: TurnCache | None = None
        """Turns of rollouts under way, within `queue_commits` and where the config asks for it."""
        self.note_units: Callable[[int, int], None] = lambda step, num_units: None
        """Hears, while a stage commits in parts, its step and how many units (groups) are there."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a task runner's workers as what it is opened from; they must find what was queued here."""
        self.flush()
        return _reopen, (self.store.root.address, self.run, self.config, self.versions)

    def find(self, key: str) -> Entry | None:
        """Return the finished work of `key`, this run's own row before another's, or None."""
        # What is still to be committed counts as finished for the run that made it.
        return self._waiting(key) or self.store.ledger.find(key, run=self.run, staleness=LEDGER_SECONDS)

    def _waiting(self, key: str) -> Entry | None:
        return self._queue.find(key) if self._queue else None

    def adopt(self, entry: Entry, step: int) -> Entry:
        """Make finished work of another run part of this one: a ledger row that points at the other's slices."""
        if entry.run == self.run:
            return entry
        return self.commit(replace(entry, run=self.run, step=step))

    @contextmanager
    def queue_commits(self, linger_seconds: float = LINGER_SECONDS) -> Iterator[None]:
        """Commit work in a thread within the block, while the next is done; for all threads of a run, and not nested.

        Quick stages may wait `linger_seconds` for others that share their commit. Threads that work here end before the
        block does. What is finished is committed, also when an error passes.
        """
        self._queue = CommitQueue(self.store.slices, self.store.ledger, linger_seconds)
        self.turns = TurnCache(self.store, self.run) if self.config.keeps_turns else None
        try:
            with self.turns or nullcontext(), self._queue:
                yield
        finally:
            self._queue = self.turns = None
            self.store.policies.drop_held()

    def scratch(self, key: str, parent: str | None) -> Path:
        """Return an empty directory for a policy's weights: in memory where the config and the room there allow it."""
        policies, memory = self.store.policies, self.config.learner.memory_directory
        usable = memory and self._queue and parent and not self.config.training.lora
        if not (usable and (before := policies.find(str(parent)))):
            return policies.scratch(key)
        # With optimizer state and float32 weights beside, a policy has seven times the bytes of one in bfloat16.
        weights = sum(file.size for file in before.files if not file.path.startswith("optimizer"))
        fits = Path(memory).is_dir() and shutil.disk_usage(memory).free > MEMORY_RATIO * weights
        return policies.scratch(key, Path(memory) if fits else None)

    def publish(self, directory: Path, policy_key: str, attempt: str) -> None:
        """Make weights a policy at once, or, if they are in memory, just before the work of `attempt` is committed."""
        policies = self.store.policies
        if self._queue and policies.is_in_memory(directory):
            policies.hold(directory, policy_key)
            self._queue.before(attempt, partial(policies.publish, directory, policy_key))
        else:
            policies.publish(directory, policy_key)

    def flush(self) -> None:
        """Commit what is finished so far; outside `queue_commits` there is nothing to do."""
        if self._queue is not None:
            self._queue.flush()

    def flush_soon(self) -> None:
        """Let what is finished so far be committed while something that takes long runs; returns immediately."""
        if self._queue is not None:
            self._queue.flush_soon()

    def append(
        self, table: str, rows: pa.Table, *, step: int, key: str, attempt: str, commits_immediately: bool = False
    ) -> Slice:
        """Add rows to a table as one slice of this run, kept for those who ask for them next; see Store.append."""
        owner = self._queue if self._queue and not commits_immediately else self.store
        piece = owner.append(table, rows, run=self.run, step=step, key=key, attempt=attempt)
        keep_recent(piece, rows)
        return piece

    def commit(self, entry: Entry, commits_immediately: bool = False) -> Entry:
        """Write the ledger row of finished work; return the row that stands.

        In a queue it is written later. With `commits_immediately` it is written now: on a race the first writer's rows
        win, and the caller continues with those.
        """
        if self._queue and not commits_immediately:
            return self._queue.commit(entry)
        self.flush()
        return self.store.ledger.commit(entry)

    def rows(self, name: str, refs: Sequence[Ref]) -> StoredRows:
        """Return the same by reference, a part for each slice, which is read when it is asked for."""
        slices = tuple(piece for entry in self._makers(name, refs) for piece in entry.slices(name))

        def read(number: int, columns: Sequence[str] | None) -> pa.Table:
            return self.read(slices[number], columns)

        return StoredRows(TABLES[name].arrow, len(slices), read, self.store.root.address, slices)

    def read(self, piece: Slice, columns: Sequence[str] | None = None) -> pa.Table:
        """Return some columns of a slice; a small one is kept, whole, for who asks next."""
        if piece.bytes > SMALL_BYTES:
            return self.store.read([piece], columns)
        # By digest: rows that were removed and sampled again under the same key are other rows.
        with _RECENT_LOCK:
            rows = _RECENT.get((piece.table, piece.digest))
        if rows is None:  # read without the lock: two threads may read the same slice
            keep_recent(piece, rows := self.store.read([piece]))
        return rows if columns is None else rows.select(list(columns))

    def table(self, name: str, refs: Sequence[Ref], columns: Sequence[str] | None = None) -> pa.Table:
        """Read table `name` from the first of the finished works `refs` that made it, and others of the same stage."""
        return self.rows(name, refs).table(columns)

    def _makers(self, name: str, refs: Sequence[Ref]) -> list[Entry]:
        """Return the first of the finished works that made a table, and others of the same stage."""
        makers = [ref for ref in refs if name in dict(ref.rows)]
        assert makers, f"no finished work among {[ref.stage for ref in refs]} makes table {name!r}"
        return [self._entry(ref) for ref in makers if ref.stage == makers[0].stage]

    def _entry(self, ref: Ref) -> Entry:
        find = partial(self.store.ledger.find, ref.key, run=self.run)
        # What is referred to is mostly known; what another process has just finished may be newer than what is.
        entry = self._waiting(ref.key) or find(staleness=math.inf) or find()
        assert entry is not None, f"{ref.stage} {ref.key} is referred to but not in the ledger"
        return entry


def _reopen(address: str, run: str, config: RunConfig, versions: Mapping[str, str]) -> RunContext:
    return RunContext(open_store(address), run, config, versions)


class StageKeys:
    """The keys of work under one config; the content of a stage's sections is computed once for all steps."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._contents: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}

    def __call__(self, stage: KeyedStage, step: int, inputs: Mapping[str, str]) -> str:
        """Return the key of `stage` at `step` over the keys of its inputs."""
        # The config is dumped once for all steps: a plan of a long run asks for thousands of keys.
        known = stage.name, stage.sections
        if known not in self._contents:
            self._contents[known] = View(self._config, stage.sections, stage.name).content()
        return work_key(stage.name, stage.version, step, self._contents[known], inputs)
