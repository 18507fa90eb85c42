"""Stage, Attempt, perform: the declaration of a stage, one attempt at one of its keys, and the way in which it is run.

A stage is a pure function of a typed record of inputs, which `Stage.read_inputs` takes from the attempt: tables,
parameters, services, the policy. `perform` makes attempts, in any thread of a run, for keys that the ledger lacks.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import uuid4

import pyarrow as pa

from configs.run import View
from storage.errors import disk_refusal
from storage.refs import Entry, Slice
from storage.turns import TurnCache
from tasks.runtime.parts import Parts, count_tokens
from tasks.runtime.refs import Policy as Policy
from tasks.runtime.refs import Ref as Ref
from tasks.runtime.refs import inputs_of as inputs_of
from tasks.runtime.refs import ref_of as ref_of
from tasks.runtime.refs import rows_of as rows_of
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import REPEATABLE, WAITS_FOR, Returned, Services
from tasks.runtime.stored_rows import StoredRows

Tables = Mapping[str, pa.Table]
Outputs = Mapping[str, pa.Table | Iterable[pa.Table]]
"""Tables by name; the rows of one may come in parts, each of which is written before the next is requested."""
Inputs = TypeVar("Inputs")
MOST_LOSSES = 10
"""Times that a service may be lost in one stage; restarts of dead ones are bounded by their own sections."""


@dataclass(frozen=True)
class Stage(Generic[Inputs]):
    """A pure function from a record of inputs to named tables, and everything that its key is made of."""

    name: str
    """The stage's name; tables, ledger and task runs carry it."""
    version: int
    """Raised when the meaning of the stage's rows changes."""
    reads: tuple[str, ...]
    """Tables that go in."""
    writes: tuple[str, ...]
    """Tables that come out."""
    sections: tuple[str, ...]
    """Config sections that the function may read; they are in the key."""
    read_inputs: "Callable[[Attempt], Inputs]"
    """Makes the record of inputs."""
    function: Callable[[Inputs, View], Outputs]
    """The pure function; its config is a view of `sections`."""
    optional: tuple[str, ...] = ()
    """Tables that go in if one of the input results made them, or come out if the function made any."""
    services: tuple[str, ...] = ()
    """Fields of `Services` that the inputs take."""
    unit: tuple[str, str] = ("", "")
    """Of a stage that commits in parts: the table and the column that name a unit, committed whole (a group)."""

    @property
    def in_parts(self) -> bool:
        """Whether the function commits finished units while it runs."""
        return bool(self.unit[0])

    @property
    def may_block(self) -> bool:
        """Whether the stage may take any time, for a service or a person."""
        return not WAITS_FOR.isdisjoint(self.services)

    @property
    def repeatable(self) -> bool:
        """Whether equal inputs give equal rows: no service that it takes samples, scores or decides."""
        return REPEATABLE.issuperset(self.services)


@dataclass
class Attempt:
    """One attempt at one key of a stage; the record of inputs is read from it."""

    stage: Stage[Any]
    context: RunContext
    step: int
    key: str
    inputs: dict[str, str]
    """Keys of the inputs by name. A stage in parts may add inputs that only the sampling determines."""
    policy: Policy | None = None
    refs: Sequence[Ref] = ()
    services: Services = field(default_factory=Services)
    parameters: Any = None
    """Record of this one call that the stage's `read_inputs` knows."""
    name: str = field(default_factory=lambda: uuid4().hex)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    tokens: int = 0

    def rows(self, table: str) -> StoredRows:
        """Return a declared input table by reference: it may be larger than memory."""
        assert table in (*self.stage.reads, *self.stage.optional), f"{self.stage.name} does not declare {table}"
        return self.context.rows(table, self.refs)

    def table(self, table: str) -> pa.Table:
        """Return a declared input table."""
        return self.rows(table).table()

    def optional_rows(self, table: str) -> StoredRows | None:
        """Return an optional table by reference; None if no input made it."""
        # Only where an input made it, so that a stage sees what its key says.
        return self.rows(table) if any(table in dict(ref.rows) for ref in self.refs) else None

    def optional_table(self, table: str) -> pa.Table | None:
        """Return an optional table; None if no input made it."""
        rows = self.optional_rows(table)
        return None if rows is None else rows.table()

    @cached_property
    def view(self) -> View:
        return View(self.context.config, self.stage.sections, self.stage.name)

    @cached_property
    def directory(self) -> Path:
        """An empty directory for the weights that the stage makes; see `RunContext.scratch`."""
        return self.context.scratch(self.key, self.policy.key if self.policy else None)

    def new_directory(self) -> Path:
        """Return an empty `directory` in place of the previous one, which is discarded.

        A process that writes into the previous one may continue to do so: its files are in no policy.
        """
        self.discard()
        vars(self).pop("directory", None)
        return self.directory

    def discard(self) -> None:
        """Remove the directory of weights that were not published, also when the run is cancelled."""
        # Read without the property, which would make the directory.
        if "directory" in vars(self):
            self.context.store.policies.discard(self.directory)

    @cached_property
    def parts(self) -> Parts:
        """Commits the units of a stage in parts."""
        parts = Parts(self.context.store, self.entry, self.stage.unit, self.context.flush, self._note_units)
        if self.turns:
            self.turns.forget(parts.finished_units())  # of a process that died between their commit and this
        return parts

    def _note_units(self, units: Collection[str], num_units: int) -> None:
        if self.turns:
            self.turns.forget(units)
        self.context.note_units(self.step, num_units)

    @property
    def turns(self) -> TurnCache | None:
        """The turns of rollouts in flight, of all stages of the run; None where they are not kept."""
        return self.context.turns

    def compute(self) -> Entry:
        """Read the inputs, call the function, write its rows and the ledger row; return the ledger row that stands."""
        if self.stage.in_parts:
            try:
                self._call()
            finally:
                self.parts.stop()  # finished units are committed, also when the stage fails
            outputs, self.tokens = self.parts.close(), self.parts.tokens
        else:
            outputs = self._write(self._call())
            if "policies" in self.stage.writes:
                # Before the ledger row: weights without a row are swept, a row without weights would be broken.
                self.context.publish(self.directory, self.key, self.name)
        entry = self.entry("", outputs, self.tokens)
        return self.context.commit(entry, not self.stage.repeatable)

    def _call(self) -> Outputs:
        return self.stage.function(self.stage.read_inputs(self), self.view)

    def _write(self, outputs: Outputs) -> list[Slice]:
        """Write the output tables, a slice for each part of a table."""
        slices, tokens = list[Slice](), Counter[str]()
        origin: dict[str, Any] = {"step": self.step, "key": self.key, "attempt": self.name}
        for name, rows in outputs.items():
            for part in [rows] if isinstance(rows, pa.Table) else rows:
                tokens[name] += count_tokens({name: part})
                slices.append(self.context.append(name, part, **origin, commits_immediately=not self.stage.repeatable))
        tables = {piece.table for piece in slices}
        missing = [name for name in self.stage.writes if name not in tables and name not in self.stage.optional]
        assert not missing and tables <= set(self.stage.writes), f"{self.stage.name} made {sorted(tables)}"
        self.tokens = next((tokens[name] for name in ("updates", "batches", "traces") if name in tokens), 0)
        return slices

    def entry(self, part: str, outputs: Sequence[Slice], tokens: int) -> Entry:
        """Return the ledger row for the whole (part empty) or for one part."""
        return Entry(
            run=self.context.run,
            step=self.step,
            stage=self.stage.name,
            stage_version=self.stage.version,
            key=self.key,
            part=part,
            attempt=self.name,
            section=self.view.content(),
            inputs=self.inputs,
            outputs=tuple(outputs),
            started_at=self.started_at,
            finished_at=datetime.now(UTC),
            tokens=tokens,
            versions=self.context.versions,
        )


def perform(
    stage: Stage[Any],
    context: RunContext,
    step: int,
    refs: Sequence[Ref] = (),
    policy: Policy | None = None,
    services: Services | None = None,
    parameters: Any = None,
    extra_inputs: Mapping[str, str] | None = None,
) -> Ref:
    """Run one stage, unless the ledger has it already: the only way in which work is done.

    `parameters` is the record of this one call that the stage's `read_inputs` expects; what it means for the rows must
    be in the key, by `extra_inputs`: digests of inputs that are no tables (a file, the number of a batch attempt).
    Raises what the stage raises, with a note that names run, step and stage and says that nothing of the attempt is
    visible.
    """
    inputs = inputs_of(refs, policy) | dict(extra_inputs or {})
    key = context.key(stage, step, inputs)
    entry = context.find(key)
    if entry is not None:
        # Found, perhaps in another run: a row of this run's own points at the same slices.
        return ref_of(context.adopt(entry, step), computed=False)
    services = services or Services()
    attempt = Attempt(stage, context, step, key, inputs, policy, refs, services, parameters)
    try:
        return ref_of(attempt.compute(), computed=True)
    except Exception as error:
        # Whichever library or process noticed it: of a disk that takes nothing the traceback says less than the place.
        where = str(getattr(error, "filename", None) or context.store.root.address)
        refusal = disk_refusal(f"stage {stage.name} of step {step} ({error})", error, where)
        (refusal or error).add_note(
            f"Run {context.run}, step {step}, stage {stage.name}. Nothing of this attempt is visible; all earlier "
            f"stages are safe in the ledger. Call the same run again to go on from here."
        )
        if refusal:
            raise refusal from error
        raise
    finally:
        attempt.discard()


def retry_lost(attempt: Callable[[], Returned], lost: type[Exception]) -> Returned:
    """Return what `attempt` returns, called again whenever it loses its service; raises the loss that is one too many.

    Asking for a service waits for its restart, and those are bounded. What lives and does not answer is not restarted:
    for that there is this bound.
    """
    for _ in range(MOST_LOSSES):
        with suppress(lost):
            return attempt()
    return attempt()
