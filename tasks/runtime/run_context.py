"""What a run works with: its store, name and config, and how its stage results are keyed, found, written and read."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from configs.run import RunConfig, View
from storage.delta.commit_buffer import CommitBuffer
from storage.keys import work_key
from storage.refs import Entry, Slice
from storage.store import Store, open_store

if TYPE_CHECKING:
    from tasks.runtime.stage import Ref, Stage


MAX_BYTES = 256 << 20


class RecentTables:
    """The last tables read, up to so many bytes; the ones not asked for longest go first. Threads may share one."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._tables: dict[Hashable, tuple[pa.Table, int]] = {}
        self._lock = threading.Lock()

    def get(self, name: Hashable, read: Callable[[], pa.Table]) -> pa.Table:
        """Return the table kept under `name`, or `read` it; a name stands for one content for ever."""
        with self._lock:
            kept = self._tables.pop(name, None)
        if kept is None:
            table = read()
            kept = table, table.nbytes  # asking for the size takes as long as a small read
        with self._lock:
            self._tables[name] = kept  # the last one now
            self._drop()
        return kept[0]

    def _drop(self) -> None:
        total = sum(size for _, size in self._tables.values())
        for name in list(self._tables):
            if total <= self._max_bytes:
                return
            total -= self._tables.pop(name)[1]


RECENT = RecentTables()
"""What all runs of this process read last: one replay after another reads the same recorded tables."""
LOOK_SECONDS = 0.1
"""For so long a look at the ledger is good enough to decide what is still to be done."""


class RunContext:
    """Where a run works: its store, its name, its config and the versions of what computes."""

    def __init__(self, store: Store, run: str, config: RunConfig, versions: Mapping[str, str]) -> None:
        self.store = store
        self.run = run
        self.config = config
        self.versions = dict(versions)
        self._keys = StageKeys(config)
        self._gathering: CommitBuffer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a task runner's workers as what it is opened from; they must find what was gathered here."""
        self.flush()
        return _reopen, (self.store.root.address, self.run, self.config, self.versions)

    def key(self, stage: "Stage", step: int, inputs: Mapping[str, str]) -> str:
        """Return the key of `stage` at `step` over the keys of its inputs."""
        return self._keys(stage, step, inputs)

    def find(self, key: str) -> Entry | None:
        """Return the finished work of `key`, this run's own row before another's, or None."""
        gathered = self._gathering.find(key) if self._gathering else None
        return gathered or self.store.ledger.find(key, run=self.run, staleness=LOOK_SECONDS)

    def adopt(self, entry: Entry, step: int) -> Entry:
        """Make finished work of another run part of this one: a ledger row that points at the other's slices."""
        if entry.run == self.run:
            return entry
        return self.commit(replace(entry, run=self.run, step=step))

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Let work become visible only in bulk within the block: for stages that take less time than commits.

        Not for several threads, and not one within another. What is finished is kept, also when an error passes.
        """
        self._gathering = CommitBuffer(self.store)
        try:
            with self._gathering:
                yield
        finally:
            self._gathering = None

    @contextmanager
    def openly(self) -> Iterator[None]:
        """Make visible what was gathered so far, and within the block all work at once."""
        self.flush()
        gathering, self._gathering = self._gathering, None
        try:
            yield
        finally:
            self._gathering = gathering

    def flush(self) -> None:
        """Make visible what was gathered so far; nothing where nothing is gathered."""
        if self._gathering is not None:
            self._gathering.flush()

    def append(self, table: str, rows: pa.Table, *, step: int, key: str, attempt: str) -> Slice:
        """Add rows to a table as one slice of this run; see Store.append."""
        store = self._gathering or self.store
        return store.append(table, rows, run=self.run, step=step, key=key, attempt=attempt)

    def commit(self, entry: Entry) -> Entry:
        """Write the ledger row of finished work; return the row that stands."""
        return (self._gathering or self.store.ledger).commit(entry)

    def table(self, name: str, refs: "Sequence[Ref]", columns: Sequence[str] | None = None) -> pa.Table:
        """Read table `name` from the first of the finished works `refs` that made it, and others of the same stage."""
        makers = [ref for ref in refs if name in dict(ref.rows)]
        assert makers, f"no finished work among {[ref.stage for ref in refs]} makes table {name!r}"
        rows = pa.concat_tables([self._rows(name, ref) for ref in makers if ref.stage == makers[0].stage])
        return rows if columns is None else rows.select(list(columns))

    def _rows(self, name: str, ref: "Ref") -> pa.Table:
        # What another process has just finished may be younger than the last look.
        entry = self.find(ref.key) or self.store.ledger.find(ref.key, run=self.run)
        assert entry is not None, f"{ref.stage} {ref.key} is referred to but not in the ledger"
        slices = entry.slices(name)
        # By digest: rows that were removed and sampled again under the same key are other rows.
        return RECENT.get((name, tuple(each.digest for each in slices)), partial(self.store.read, list(slices)))


def _reopen(address: str, run: str, config: RunConfig, versions: Mapping[str, str]) -> RunContext:
    return RunContext(open_store(address), run, config, versions)


class StageKeys:
    """Names work under one config; what the sections of a stage say is put together once for all steps."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._contents: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}

    def __call__(self, stage: "Stage", step: int, inputs: Mapping[str, str]) -> str:
        """Return the key of `stage` at `step` over the keys of its inputs."""
        known = stage.name, stage.sections
        if known not in self._contents:
            self._contents[known] = View(self._config, stage.sections, stage.name).content()
        return work_key(stage.name, stage.version, step, self._contents[known], inputs)


def key_of(config: RunConfig, stage: "Stage", step: int, inputs: Mapping[str, str]) -> str:
    """Return the key of `stage` at `step` under `config`, over the keys of its inputs."""
    return StageKeys(config)(stage, step, inputs)
