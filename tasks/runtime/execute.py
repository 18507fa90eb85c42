"""Runs one stage: key, ledger, inputs, compute, slices, and the ledger row that makes them exist.

A long stage commits its finished groups while the rest is still under way, each commit as a part of its key.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from configs.run import View
from storage.errors import disk_refusal
from storage.refs import Entry, Slice
from storage.store import Store
from storage.turns import KeptTurns
from tasks.runtime.run_context import RECENT, RunContext
from tasks.runtime.services import Services, asked_services, is_repeatable, waits
from tasks.runtime.stage import Outputs, Policy, Ref, Stage, Tables, inputs_of, ref_of

LINGER_SECONDS = 0.1
"""How long a first finished group waits for others that then share its commit: those of a batch end close together."""
PAUSE_RATIO = 3.0
"""Pause after a commit, in durations of that commit: committing takes at most a quarter of the time."""


class MakeEntry(Protocol):
    """Makes the ledger row of a part, or of the whole, out of its slices."""

    def __call__(self, part: str, outputs: Sequence[Slice], tokens: int) -> Entry: ...


class Parts:
    """Commits the finished units (groups) of one key as they come, and knows those that an earlier attempt committed.

    `put` returns at once; one thread commits everything that has come since its last commit, so that the caller's
    event loop never waits for the disk and a slow disk means larger parts, not a queue. It waits LINGER_SECONDS before
    a commit, and PAUSE_RATIO times what that took after it: more groups then share one, and running rollouts have the
    processor.
    """

    def __init__(
        self,
        store: Store,
        make_entry: MakeEntry,
        unit: tuple[str, str],
        commit_earlier: Callable[[], None] = lambda: None,
        tell: Callable[[Collection[str], int], None] = lambda units, num_units: None,
    ) -> None:
        """Open the parts of a key. `unit` is the table and the column that name a unit: that of a group's id, say.

        `commit_earlier` waits for the commit of what they are made from: nothing is committed before that. After
        each commit `tell` is called with the units that are safe by it and the number of all units handed over.
        """
        self._tell = tell
        self._store = store
        self._commit_earlier = commit_earlier
        self._unit = unit
        self._make_entry = make_entry
        # Only for what all parts have in common: run, step, key, attempt.
        first = make_entry("", (), 0)
        self._identity: dict[str, Any] = {name: getattr(first, name) for name in ("run", "step", "key", "attempt")}
        # What else is in a part that repeats a unit is made again.
        self._earlier, self._units = store.first_parts(store.ledger.parts(first.key), unit)
        self._committed: list[Entry] = list(self._earlier)
        self._waiting: list[Mapping[str, pa.Table]] = []
        self._wake = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="parts", daemon=True)
        self._thread.start()

    @property
    def tokens(self) -> int:
        """Tokens over all committed parts."""
        return sum(entry.tokens for entry in self._committed)

    def earlier_rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table that earlier attempts committed."""
        slices = [piece for entry in self._earlier for piece in entry.slices(table)]
        return self._store.read(slices).to_pylist() if slices else []

    def finished_units(self) -> set[str]:
        """Return the units that were handed over, by earlier attempts or this one."""
        with self._wake:
            self._raise()
            return set(self._units)

    def put(self, tables: Mapping[str, pa.Table]) -> None:
        """Hand over the rows of finished units, or rows of no unit; raises what an earlier commit raised."""
        with self._wake:
            self._raise()
            self._waiting.append(tables)
            # At once, not when they are committed: the caller must not begin them again.
            self._units |= self._unit_names(tables[self._unit[0]]) if self._unit[0] in tables else set()
            self._wake.notify()

    def close(self) -> list[Slice]:
        """Commit what is waiting and return the slices of every part, in the order of their commits."""
        self.stop()
        self._raise()
        return [piece for entry in self._committed for piece in entry.outputs]

    def stop(self) -> None:
        """Commit what is waiting and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        # What was handed over is safe before the stage ends, whichever way.
        self._thread.join()

    def _unit_names(self, rows: pa.Table) -> set[str]:
        return {str(name) for name in rows[self._unit[1]].to_pylist()}

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while (pieces := self._take()) is not None:
                began = time.monotonic()
                self._commit(pieces)
                self._pause(PAUSE_RATIO * (time.monotonic() - began))
        except BaseException as failure:  # handed to the caller at its next put or close
            self._failure = failure

    def _pause(self, seconds: float) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._closing, seconds)

    def _take(self) -> list[Mapping[str, pa.Table]] | None:
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closing)
            self._wake.wait_for(lambda: self._closing, LINGER_SECONDS)
            pieces, self._waiting = self._waiting, []
            return pieces or None

    def _commit(self, pieces: Sequence[Mapping[str, pa.Table]]) -> None:
        names = dict.fromkeys(name for piece in pieces for name in piece)  # an optional table is not in every piece
        tables = {name: pa.concat_tables([piece[name] for piece in pieces if name in piece]) for name in names}
        self._commit_earlier()
        slices = [self._store.append(name, rows, **self._identity) for name, rows in tables.items()]
        for piece in slices:
            RECENT.put((piece.table, piece.digest), tables[piece.table])
        self._committed.append(self._store.ledger.commit(self._make_entry(uuid4().hex, slices, count_tokens(tables))))
        name, column = self._unit
        self._tell(self._unit_names(tables[name].select([column])) if name in tables else (), len(self._units))


def count_tokens(tables: Mapping[str, pa.Table]) -> int:
    """Return how many tokens `tables` speak of: trained, packed, or sampled and fed in; 0 where that means nothing."""
    if "updates" in tables:
        return int(pc.sum(tables["updates"]["num_tokens"]).as_py() or 0)
    if "batches" in tables:
        return int(pc.sum(pc.list_value_length(tables["batches"]["token_ids"])).as_py() or 0)
    if "traces" in tables:
        traces = tables["traces"]
        return int(pc.sum(pc.add(traces["num_input_tokens"], traces["num_output_tokens"])).as_py() or 0)
    return 0


OWN = ("step", "key", "policy", "directory", "new_directory", "parts", "inputs", "turns")
"""Keywords of stages whose values an attempt has itself. A stage may add to `inputs` what it turns out to take."""


@dataclass
class Attempt:
    """One attempt at one key."""

    stage: Stage
    context: RunContext
    step: int
    key: str
    inputs: dict[str, str]
    policy: Policy | None
    when_computed: Callable[[], None] | None = None
    name: str = field(default_factory=lambda: uuid4().hex)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def at_once(self) -> bool:
        """Whether the work counts at once, and the rows of whoever was first with it are gone on with."""
        return not is_repeatable(self.stage)

    @cached_property
    def view(self) -> View:
        return View(self.context.config, self.stage.sections, self.stage.name)

    @cached_property
    def directory(self) -> Path:
        """An empty directory for the weights that the stage makes; see `RunContext.scratch`."""
        return self.context.scratch(self.key, self.policy.key if self.policy else None)

    def new_directory(self) -> Path:
        """Return an empty `directory` in place of the one before, which is given up.

        Whoever was asked to write there may be cut off and go on: what it writes later is in no policy.
        """
        self.discard()
        vars(self).pop("directory", None)
        return self.directory

    @cached_property
    def parts(self) -> Parts:
        parts = Parts(self.context.store, self.entry, self.stage.unit, self.context.flush, self._note_units)
        if self.turns:
            self.turns.forget(parts.finished_units())  # of a process that died between their commit and this
        return parts

    def _note_units(self, units: Collection[str], num_units: int) -> None:
        if self.turns:
            self.turns.forget(units)
        self.context.note_units(self.stage.name, self.step, num_units)

    @property
    def turns(self) -> KeptTurns | None:
        """The turns of rollouts under way, of all stages of the run; None where they are not kept."""
        return self.context.turns

    def compute(self, refs: Sequence[Ref], services: Services, parameters: Mapping[str, Any]) -> list[Slice]:
        """Read the inputs, call the stage's function, write the rows that it returns; return the slices."""
        # An optional table goes in only where an input made it, so that a stage sees what its key says.
        made = {name for ref in refs for name in dict(ref.rows)}
        reads = (*self.stage.reads, *(name for name in self.stage.optional if name in made))
        tables: dict[str, Any] = {
            name: (self.context.rows if name in self.stage.by_reference else self.context.table)(name, refs)
            for name in reads
        }
        keywords = self._keywords(services, parameters)
        if "parts" in keywords:
            return self._compute_in_parts(tables, keywords)
        slices = self._write(self._call(tables, keywords))
        if "policies" in self.stage.writes:
            # Before the ledger row: weights without a row are swept, a row without weights would be broken.
            self.context.publish(self.directory, self.key, self.name)
        return slices

    def _call(self, tables: Tables, keywords: Mapping[str, Any]) -> Outputs:
        made = self.stage.function(tables, self.view, **keywords)
        if self.when_computed:
            self.when_computed()
        return made

    def _write(self, outputs: Outputs) -> list[Slice]:
        """Write what the stage made, a slice for each part of a table."""
        place: dict[str, Any] = {"step": self.step, "key": self.key, "attempt": self.name, "at_once": self.at_once}
        slices, tokens = list[Slice](), dict[str, int]()
        for name, rows in outputs.items():
            for part in [rows] if isinstance(rows, pa.Table) else rows:
                tokens[name] = tokens.get(name, 0) + count_tokens({name: part})
                slices.append(self.context.append(name, part, **place))
        made = {piece.table for piece in slices}
        missing = [name for name in self.stage.writes if name not in made and name not in self.stage.optional]
        assert not missing and made <= set(self.stage.writes), f"{self.stage.name} made {sorted(made)}"
        self.tokens = next((tokens[name] for name in ("updates", "batches", "traces") if name in tokens), 0)
        return slices

    def _compute_in_parts(self, tables: Tables, keywords: Mapping[str, Any]) -> list[Slice]:
        try:
            self._call(tables, keywords)
        finally:
            self.parts.stop()  # what is finished is committed, also when the stage fails
        return self.parts.close()

    def discard(self) -> None:
        """Remove the directory of weights that were not published, also when the run is cancelled."""
        # Looked up without the property, which would make the directory.
        if "directory" in vars(self):
            self.context.store.policies.discard(self.directory)

    def finish(self, outputs: Sequence[Slice]) -> Entry:
        """Write the one ledger row that makes the work exist; return the row that stands."""
        tokens = self.parts.tokens if "parts" in self.stage.keywords else self.tokens
        return self.context.commit(self.entry("", outputs, tokens), self.at_once, soon=waits(self.stage))

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

    def _keywords(self, services: Services, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the function takes by keyword: the attempt's own, services, and the parameters of this call."""
        keywords = {**parameters, **{name: getattr(self, name) for name in OWN if name in self.stage.keywords}}
        for name in asked_services(self.stage):
            keywords[name] = getattr(services, name)
            assert keywords[name] is not None, f"stage {self.stage.name} asks the service {name}, and there is none"
        return keywords


def perform(
    stage: Stage,
    context: RunContext,
    step: int,
    refs: Sequence[Ref] = (),
    policy: Policy | None = None,
    services: Services | None = None,
    parameters: Mapping[str, Any] | None = None,
    extra_inputs: Mapping[str, str] | None = None,
    when_computed: Callable[[], None] | None = None,
) -> Ref:
    """Run one stage, unless the ledger has it already: the only way in which work is done.

    `parameters` are keywords of this one call; what they mean for the rows must be in the key, by `extra_inputs`: the
    digests of inputs that are no tables (a file, the number of a batch attempt). `when_computed` is called when the
    stage's function has returned, before what it made is committed. Raises what the stage raises, with a note that says
    which run, step and stage it was and that nothing of the attempt is visible.
    """
    inputs = inputs_of(refs, policy) | dict(extra_inputs or {})
    key = context.key(stage, step, inputs)
    entry = context.find(key)
    if entry is not None:
        # Found, perhaps in another run: a row of this run's own points at the same slices.
        return ref_of(context.adopt(entry, step), computed=False)
    attempt = Attempt(stage, context, step, key, inputs, policy, when_computed)
    try:
        return ref_of(attempt.finish(attempt.compute(refs, services or Services(), parameters or {})), computed=True)
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
