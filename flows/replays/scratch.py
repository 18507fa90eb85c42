"""Computes a replay in memory: what is recorded is read, and nothing is written."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import polars as pl
import pyarrow as pa

from configs.run import RunConfig
from flows.replays.steps import replay_steps
from flows.runtime.executor import Executor
from flows.runtime.resolve_run import Source
from storage.refs import Entry, Slice
from storage.store import Store
from tasks.runtime.execute import perform
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Ref


class ScratchContext(RunContext):
    """The context of a run whose own results stay in memory, for stages that ask no service and make no weights."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        super().__init__(store, config.name, config, {})
        self._entries: dict[str, Entry] = {}
        self._tables: dict[Slice, pa.Table] = {}

    def find(self, key: str) -> Entry | None:
        """Return the finished work of `key`, in memory or of any run in the ledger, or None."""
        return self._entries.get(key) or super().find(key)

    def append(
        self, table: str, rows: pa.Table, *, step: int, key: str, attempt: str, commits_immediately: bool = False
    ) -> Slice:
        """Keep rows in memory; return the slice that stands for them, which has no files."""
        piece = Slice(table, self.run, attempt, rows.num_rows, uuid4().hex, ())
        self._tables[piece] = rows
        return piece

    def commit(self, entry: Entry, commits_immediately: bool = False) -> Entry:
        """Remember finished work; return it."""
        return self._entries.setdefault(entry.key, entry)

    def adopt(self, entry: Entry, step: int) -> Entry:
        """Return finished work of another run as it is: this run has no row for it."""
        return entry

    def _entry(self, ref: Ref) -> Entry:
        return self._entries.get(ref.key) or super()._entry(ref)

    def read(self, piece: Slice, columns: Sequence[str] | None = None) -> pa.Table:
        """Return some columns of a slice, in memory or of the store."""
        if piece not in self._tables:
            return super().read(piece, columns)
        return self._tables[piece] if columns is None else self._tables[piece].select(list(columns))


class ScratchExecutor(Executor):
    """Computes here what the ledger does not have, without Prefect and without a session."""

    def __init__(self, context: ScratchContext) -> None:
        super().__init__(context=context)
        self._scratch = context

    def __call__(self, task: StageTask, step: int, *refs_and_policy: Any, **inputs: Any) -> Ref:
        """Return the reference to a stage's result, which is computed at once where nobody has it."""
        return perform(task.stage, self._scratch, step, *refs_and_policy, **inputs)

    def _context_of(self, ref: Ref) -> RunContext | None:
        return self._scratch


def credit_in_memory(store: Store, config: RunConfig) -> pl.DataFrame:
    """Return the samples of a replay up to the advantages, each with its step, without a trace in the store.

    Raises AdvantageBreach where the algorithm refuses the rollouts.
    """
    context = ScratchContext(store, config)
    steps = replay_steps(ScratchExecutor(context), Source("", ""), store)
    samples = [(step.step, context.table("samples", (step.work["advantage"],))) for step in steps]
    return pl.concat([pl.DataFrame(rows).with_columns(step=pl.lit(step)) for step, rows in samples])
