"""Rebuilds rows of a lost ledger: each run is walked as for a plan, and results that the tables hold are named.

A row of a stage table names its run, step, key and attempt. A key is a hash of stage, version, step, config section and
inputs, so a walk that comes to a key of the tables proves everything that the ledger's row says, but for the times.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from configs.errors import ConfigError
from configs.run import RunConfig, View
from flows.queries.store_reader import recorded_config
from flows.replays.loop import plan_replay
from flows.runtime.executor import Executor
from flows.runtime.loop import plan_work
from flows.runtime.resolve_run import PolicyUnknown, Source, find_policy, source_of
from storage.delta.log import ActiveFile
from storage.errors import StoreError
from storage.records import REMOVED
from storage.refs import Entry, File, Slice
from storage.schemas.stage_tables import STAGE_TABLES, TABLES
from storage.slices import content_digest
from storage.store import Store
from tasks.inference.engine.model_info import directory_digest
from tasks.runtime.parts import count_tokens
from tasks.runtime.prefect_task import StageTask
from tasks.runtime.run_context import RunContext, StageKeys
from tasks.runtime.stage import Policy, Ref, Stage, inputs_of, ref_of
from tasks.training import policy as policy_import

MAX_NAMED = 5
"""Results that a line names."""
AttemptSlices = Sequence[tuple[Slice, pa.Table]]
"""The slices of one attempt with their rows."""
VERSIONS = {"rebuilt": "stagecoach repair"}
"""What a rebuilt row says in place of the versions of the code that made its rows."""


@dataclass(frozen=True)
class RebuiltLedger:
    """What was rebuilt: rows of the ledger by run, and a line for each run of which something could not be proved."""

    rows: Mapping[str, int]
    unproved: tuple[str, ...]


def rebuild_ledger(store: Store) -> RebuiltLedger:
    """Commit ledger rows for results that the tables hold and the ledger does not name; return what came of it."""
    recorded = RecordedRows(store)
    before = {entry.row_id for entry in store.ledger.entries()}
    problems: dict[str, str] = {}
    runs = [run for run in store.runs.names() if store.runs.last_event(run) != REMOVED]
    num_rows = -1
    while num_rows != (num_rows := len(store.ledger.entries())):  # a replay comes after the run that it goes through
        for run in runs:
            problems.pop(run, None)
            try:
                missing = _missing(store, run, _walk(store, run, recorded))
            except (ValueError, LookupError, OSError) as error:
                problems[run] = f"its results are unknown: {error}"
                continue
            if missing:
                names = ", ".join(f"{ref.stage} of step {ref.step}" for ref in missing[:MAX_NAMED])
                problems[run] = f"{len(missing)} results have no rows in the tables, or no weights: {names}"
    rows = Counter(entry.run for entry in store.ledger.entries() if entry.row_id not in before)
    return RebuiltLedger(rows, tuple(_list_unproved(store, recorded, problems)))


def _missing(store: Store, run: str, results: Sequence[Ref]) -> list[Ref]:
    """Return the results that a run must have had and of which nothing was found."""
    is_finished = store.runs.last_event(run) == "finished"
    last = max((ref.step for ref in results if not ref.computed), default=-1)
    return [ref for ref in results if ref.computed and (is_finished or ref.step < last)]


def _walk(store: Store, run: str, recorded: "RecordedRows") -> list[Ref]:
    config = recorded_config(store, run)
    assert config is not None, "a run that has a name has an event"
    context = RunContext(store, run, config, VERSIONS)
    source, executor = _source(store, config), partial(Rebuilder, recorded)
    if config.kind == "replay":
        return plan_replay(context, source, executor)
    policy = None
    with suppress(PolicyUnknown):  # the run that made it comes later
        policy = find_policy(store, config.evaluation.policy) if config.kind == "evaluate" else None
    return plan_work(context, source, policy, executor)


def _source(store: Store, config: RunConfig) -> Source:
    """Return where a run started from; of weights that are gone the copy in the store, told by its key."""
    try:
        return source_of(config)
    except (ConfigError, OSError):
        for key in store.policies.names():
            directory = store.policies.directory(key, verify=False)
            digest = directory_digest(directory)
            if StageKeys(config)(policy_import.STAGE, 0, {"weights": digest}) == key:
                model = config.model.model_copy(update={"path": str(directory)})
                return source_of(config.model_copy(update={"model": model}))
        raise


def _list_unproved(store: Store, recorded: "RecordedRows", problems: Mapping[str, str]) -> list[str]:
    named = {entry.key for entry in store.ledger.entries()}
    unnamed: dict[str, set[str]] = {}
    for key, places in recorded.places.items():
        for place in places if key not in named else ():
            unnamed.setdefault(place.run, set()).add(key)
    lines = [f"run {run!r}: {why}" for run, why in problems.items()]
    for run, keys in unnamed.items():
        last = store.runs.last_event(run)
        if last == REMOVED:
            continue
        why = "its config does not lead to their keys, or attempts at them contradict each other"
        why = why if last else "the table runs has no event of it, and no other file holds its config"
        lines.append(f"run {run!r}: rows of {len(keys)} results are in the tables and not in the ledger: {why}")
    return sorted(lines)


@dataclass(frozen=True)
class AttemptRows:
    """Where the rows of one attempt at one key are in one table."""

    table: str
    run: str
    attempt: str
    file: ActiveFile
    step: int

    @property
    def maker(self) -> tuple[str, str]:
        """The run and the attempt, without the number that further slices of one attempt carry."""
        return self.run, self.attempt.partition(".")[0]


class RecordedRows:
    """The rows of all stage tables by key, and slices made of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.places: dict[str, list[AttemptRows]] = {}
        for name in sorted({table.name for table in STAGE_TABLES} & {*store.root.names("tables")}):
            table = store.slices.table(name)
            for file in sorted(table.active_files(), key=lambda each: each.added_at):
                with suppress(StoreError):  # a damaged file proves nothing
                    rows = table.read(file.path).select(["key", "attempt", "step"])
                    for row in rows.group_by(["key", "attempt", "step"], use_threads=False).aggregate([]).to_pylist():
                        place = AttemptRows(name, file.run, row["attempt"], file, row["step"])
                        self.places.setdefault(row["key"], []).append(place)
        self._tables = {place.table for places in self.places.values() for place in places}

    def find(self, stage: Stage[Any], key: str) -> list[AttemptSlices]:
        """Return the slices of a key with their rows, one list for each attempt, the earliest first.

        None of an attempt that lacks a table which the stage always writes, while that table has rows of other work: a
        table without rows has no file.
        """
        by_maker: dict[tuple[str, str], list[AttemptRows]] = {}
        for place in self.places.get(key, ()):
            if place.table in stage.writes:
                by_maker.setdefault(place.maker, []).append(place)
        attempts: list[AttemptSlices] = []
        for maker, places in by_maker.items():
            order = sorted(places, key=lambda each: (stage.writes.index(each.table), each.file.added_at, each.attempt))
            slices = [self._slice(place) for place in order]
            absent = {*stage.writes} - {*stage.optional} - {place.table for place in places}
            if absent <= self._tables:
                attempts.append([*slices, *(self._empty(name, *maker) for name in stage.writes if name in absent)])
        return attempts

    def _slice(self, place: AttemptRows) -> tuple[Slice, pa.Table]:
        table = self._store.slices.table(place.table)
        rows = table.read(place.file.path, [place.attempt]).sort_by("seq").combine_chunks()
        rows = rows.select(TABLES[place.table].arrow.names)
        # Of a file that compaction made the one before it is not known: its rows are found by attempt.
        file = File(f"run={place.run}/{place.attempt}.parquet", 0, "")
        if place.file.first_attempt == place.file.last_attempt:
            data = self._store.root.read(f"{table.place}/{place.file.path}")
            file = File(place.file.path, len(data), sha256(data).hexdigest())
        digest = content_digest(rows)
        return Slice(place.table, place.run, place.attempt, rows.num_rows, digest, (file,)), rows

    def _empty(self, table: str, run: str, attempt: str) -> tuple[Slice, pa.Table]:
        rows = TABLES[table].arrow.empty_table()
        return Slice(table, run, attempt, 0, content_digest(rows), ()), rows


class Rebuilder(Executor):
    """A dry run that commits the ledger's row of each result whose rows are in the tables."""

    def __init__(self, recorded: RecordedRows, context: RunContext) -> None:
        super().__init__(context=context)
        self._recorded, self._run = recorded, context

    def __call__(
        self,
        task: StageTask,
        step: int,
        refs: Sequence[Ref] = (),
        policy: Policy | None = None,
        parameters: Any = None,
        extra_inputs: Mapping[str, str] | None = None,
    ) -> Ref:
        """Return the reference to a stage's result, which the ledger names from now on where the tables hold it."""
        inputs = inputs_of(refs, policy) | dict(extra_inputs or {})
        key = self._keys(task.stage, step, inputs)
        if key in self._recorded.places and self._find(key) is None:
            for part, attempt in self._proved_slices(task.stage, key, refs):
                entry = self._entry(task.stage, step, key, inputs, part, attempt)
                self._run.store.ledger.commit_all([entry], rebuilt=True)
        return super().__call__(task, step, refs, policy, parameters, extra_inputs)

    def share(self, entry: Entry, step: int) -> Ref:
        """Make a result of another run part of this one, as the run itself did; return the reference to it."""
        return ref_of(self._run.adopt(entry, step), computed=False)

    def _proved_slices(self, stage: Stage[Any], key: str, refs: Sequence[Ref]) -> Iterator[tuple[str, AttemptSlices]]:
        """Yield the slices of a result with the name of their part, empty for the whole; nothing that is not proved."""
        policies = self._run.store.policies
        if "policies" in stage.writes and not (policies.find(key) or policies.removal_note(key)):
            return
        attempts = self._recorded.find(stage, key)
        if not stage.in_parts:
            if attempts and all(_digests(attempt) == _digests(attempts[0]) for attempt in attempts):
                yield "", attempts[0]
            return
        # As a whole where the finished units are all that were assigned, else as parts.
        table, column = stage.unit
        units, chosen = set[str](), list[AttemptSlices]()
        for attempt in attempts:
            own = {str(unit) for piece, rows in attempt if piece.table == table for unit in rows[column].to_pylist()}
            if not own & units:  # what is sampled twice counts once
                units, chosen = units | own, [*chosen, attempt]
        assigned = [ref for ref in refs if "assignments" in dict(ref.rows) and not ref.computed]
        required = {unit for ref in assigned for unit in pc.unique(self.rows("assignments", ref)[column]).to_pylist()}
        if required and required <= units:
            yield "", [piece for attempt in chosen for piece in attempt]
        else:
            yield from ((attempt[0][0].attempt, attempt) for attempt in chosen)

    def _entry(
        self, stage: Stage[Any], step: int, key: str, inputs: Mapping[str, str], part: str, attempt: AttemptSlices
    ) -> Entry:
        tokens = Counter[str]()
        for piece, rows in attempt:
            tokens[piece.table] += count_tokens({piece.table: rows})
        counted = next((name for name in ("updates", "batches", "traces") if name in tokens), "")
        moment = datetime.fromtimestamp(max(place.file.added_at for place in self._recorded.places[key]) / 1000, UTC)
        return Entry(
            run=self._run.run,
            step=step,
            stage=stage.name,
            stage_version=stage.version,
            key=key,
            part=part,
            attempt=attempt[0][0].attempt.partition(".")[0],
            section=View(self.config, stage.sections, stage.name).content(),
            inputs=dict(inputs),
            outputs=tuple(piece for piece, _ in attempt),
            started_at=moment,
            finished_at=moment,
            tokens=tokens[counted],
            versions=self._run.versions,
        )


def _digests(attempt: AttemptSlices) -> list[tuple[str, str]]:
    return [(piece.table, piece.digest) for piece, _ in attempt]
