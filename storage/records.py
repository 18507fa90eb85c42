"""The records of a store, each a system table held in memory: events of runs, quarantines, expired slices."""

import json
import os
import socket
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import cached_property
from threading import RLock
from typing import Any

import pyarrow as pa

from storage.delta.table import StoredTable
from storage.errors import RunUnknown, SliceExpired, StoreError
from storage.keys import canonical_json, content_key
from storage.refs import Slice
from storage.roots import Root
from storage.schemas.contract import Table
from storage.schemas.system_tables import EXPIRED_SLICES, NOTES_TABLE, QUARANTINES, RUNS


class CachedTable:
    """One system table; a subclass takes each of its records, of type `record_type`, into memory."""

    contract: Table
    record_type: Any

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = RLock()
        self._version: int | None = None
        self._read_files: set[str] = set()

    @cached_property
    def table(self) -> StoredTable:
        """The stored table, opened when it is first read: most processes never need every system table."""
        return StoredTable(self._root, self.contract.name, self.contract.arrow, has_head=True)

    def refresh(self) -> int:
        """Read what was committed since the last refresh; return a number that is another after every commit."""
        with self._lock:
            self._refresh()
            return self._version or 0

    def add_records(self, records: Sequence[Any]) -> None:
        """Add records of this or another store as they are, those of one run in one commit."""
        for run in dict.fromkeys(record.run for record in records):
            rows = [self._row(record) for record in records if record.run == run]
            self.table.append(pa.Table.from_pylist(rows, self.contract.arrow).drop_columns(["run"]), run)

    def _refresh(self) -> None:
        """Read the files added since the last refresh; rows that were merged into another file may come once more."""
        paths, version = self.table.new_files(self._version)
        for path in self._unread(paths):
            self._add_file(path, path.split("/")[0].removeprefix("run="))
            self._read_files.add(path)
        self._version = version

    def _unread(self, paths: Sequence[str]) -> list[str]:
        """The files to read, of those that were added since the last refresh."""
        return [path for path in paths if path not in self._read_files]

    def _add_file(self, path: str, run: str) -> None:
        """Take the rows of one file of a run into memory."""
        for row in self.table.read(path).to_pylist():
            values = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
            self._add_record(self.record_type(**{**values, "run": run, "at": row["at"].astimezone(UTC)}))

    def _row(self, record: Any) -> dict[str, Any]:
        """Return a record as a row of the table."""
        return dict(vars(record))

    def _add_record(self, record: Any) -> None:
        """Take one record into memory; it may come more than once."""
        raise AssertionError("each system table has records of its own kind")


class NamedRecords(CachedTable):
    """A system table whose records have names, the values of `id_columns`; of several with one name one stands."""

    id_columns: tuple[str, ...]

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self._records: dict[Any, Any] = {}
        """By name."""

    def _add_record(self, record: Any) -> None:
        name = self._name(record)
        self._records[name] = self._select(self._records.get(name, record), record)

    def _name(self, record: Any) -> object:
        return tuple(getattr(record, column) for column in self.id_columns)

    def _select(self, earlier: Any, later: Any) -> Any:
        """Return which of two records of one name stands, in the order in which they were read."""
        return earlier

    def _all(self) -> list[Any]:
        with self._lock:
            self._refresh()
            return list(self._records.values())


REMOVED = "removed"
"""The event of a run whose work was removed from the store; its name may be used again."""
STARTS = ("started", "resumed")
"""The events after which a run is at work, or its process died without a word."""
LOST = "lost"
"""The event of a service that ended unasked while a run was at work: it says nothing of the run's own state."""
JOIN, LEAVE, LEFT = "join", "leave", "left"
"""The events of engines that come to a run, are to leave it, and have left it; their message is the engine's URL."""
ENGINE_EVENTS = (JOIN, LEAVE, LEFT)
ALERT, ALERT_FAILED = "alert", "alert failed"
"""The events of a message that was sent to somebody, and of one that did not reach its receiver."""
WARNING = "warning"
"""The event of a rule that began to hold at a step (`tasks.metrics.warnings`)."""
SERVICE_EVENTS = (LOST, *ENGINE_EVENTS, ALERT, ALERT_FAILED, WARNING)
PROCESS = "process "
"""How the stored message of a start or resumption begins; the identity of the run's process follows."""
MAX_SUGGESTIONS = 5
"""Runs that the error about an unknown run names."""


@dataclass(frozen=True)
class Event:
    """One event in the life of a run; the columns of the runs table, config parsed."""

    run: str
    event: str
    at: datetime
    kind: str
    config: Mapping[str, Any]
    parent_run: str | None
    step: int
    message: str
    flow_run: str | None
    host: str
    pid: int
    process: str = ""
    """Of a start or resumption: the identity of the process (`flows.services.ownership`). It is stored as the message,
    which such an event has none of; events of older versions are without it."""


class Runs(CachedTable):
    """The events of all runs, in memory and kept up to date."""

    contract = RUNS
    record_type = Event

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self._events: dict[str, list[Event]] = {}
        self._of_services: dict[str, list[Event]] = {}

    def record(
        self,
        *,
        run: str,
        event: str,
        kind: str | None = None,
        config: Mapping[str, Any] | None = None,
        step: int = 0,
        message: str = "",
        parent_run: str | None = None,
        flow_run: str | None = None,
        host: str | None = None,
        pid: int | None = None,
        process: str = "",
    ) -> Event:
        """Record an event now. Kind, config and parent default to the run's last event's, host and pid to ours.

        Its time is never before that of an event of the store that was committed earlier, however the clock was set.
        Raises RunUnknown where a first event brings no kind or config.
        """
        before = self._events_of(run)
        # Just after the newest event of the store: the order of events is that of their commits.
        newest = [events[-1].at for each in (self._events, self._of_services) for events in list(each.values())]
        if (kind is None or config is None) and not before:
            raise RunUnknown(f"run {run!r} has no earlier event to take kind and config from", do="give both")
        recorded = Event(
            run=run,
            event=event,
            at=max([datetime.now(UTC), *(at + timedelta(microseconds=1) for at in newest)]),
            kind=before[-1].kind if kind is None else kind,
            config=before[-1].config if config is None else config,
            parent_run=before[-1].parent_run if parent_run is None and before else parent_run,
            step=step,
            message=message,
            flow_run=flow_run,
            host=socket.gethostname() if host is None else host,
            pid=os.getpid() if pid is None else pid,
            process=process,
        )
        assert not (process and message), "the column of the message holds one of them"
        self.add_records([recorded])
        return recorded

    def lost_services(self, run: str) -> list[Event]:
        """The services that a run lost, in order of time."""
        return [event for event in self.service_events(run) if event.event == LOST]

    def joined_engines(self, run: str) -> list[str]:
        """The URLs of the engines that have joined a run and were not told to leave it, in order of time."""
        return [url for url, event in self.engine_events(run).items() if event == JOIN]

    def engine_events(self, run: str) -> dict[str, str]:
        """By URL of each engine that has ever joined a run, the last of its events, in the order of these."""
        events = dict[str, str]()
        for event in self.service_events(run):
            if event.event in ENGINE_EVENTS and events.get(event.message) != event.event:
                events.pop(event.message, None)  # the order is that of the last changes
                events[event.message] = event.event
        return events

    def service_events(self, run: str) -> list[Event]:
        """The events of a run's services and alerts in order of time; `events` has none of them.

        Those of a run of its name that was removed do not count.
        """
        with self._lock:
            self._refresh()
            removals = [each.at for each in self._events.get(run, []) if each.event == REMOVED]
            return [each for each in self._of_services.get(run, []) if not removals or each.at > removals[-1]]

    def events(self, run: str) -> list[Event]:
        """The events of a run in order of time; RunUnknown if there are none."""
        found = self._events_of(run)
        if not found:
            raise self.unknown(run)
        return found

    def unknown(self, run: str) -> RunUnknown:
        """Return the error for a name that no run of the store has; it names the nearest runs."""
        where = f"store {self._root.address}; {self.similar_names(run)}"
        return RunUnknown(f"there is no run {run!r}", where, "nothing was changed", "give one of these names")

    def similar_names(self, run: str) -> str:
        """Say, for an error, which runs have a name like this one; where none has, which runs are the newest."""
        names = self.names()
        begun = [name for name in names if run and name.startswith(run)][-MAX_SUGGESTIONS:]
        alike = begun or get_close_matches(run, names, MAX_SUGGESTIONS)
        return (
            f"the nearest runs are: {', '.join(alike)}"
            if alike
            else f"the last runs are: {', '.join(names[-MAX_SUGGESTIONS:]) or 'none'}"
        )

    def last(self, run: str) -> Event | None:
        """The newest event of a run; None where there are none."""
        return next(reversed(self._events_of(run)), None)

    def last_event(self, run: str) -> str:
        """What the newest event of a run is called; empty where there are none."""
        last = self.last(run)
        return last.event if last else ""

    def names(self) -> list[str]:
        """The names of all runs, in order of their last event."""
        with self._lock:
            self._refresh()
            return sorted(self._events, key=lambda run: (self._events[run][-1].at, run))

    def latest(self) -> str | None:
        """The run with the newest event, but those removed; None in an empty store."""
        return next((run for run in reversed(self.names()) if self.last_event(run) != REMOVED), None)

    def config(self, run: str) -> dict[str, Any]:
        """The resolved config that the run used last."""
        return dict(self.events(run)[-1].config)

    def _events_of(self, run: str) -> list[Event]:
        with self._lock:
            self._refresh()
            return list(self._events.get(run, []))

    def _row(self, record: Event) -> dict[str, Any]:
        row = {**vars(record), "config": canonical_json(record.config)}
        process = row.pop("process")
        return row | ({"message": PROCESS + process} if process else {})

    def _add_record(self, record: Event) -> None:
        event = replace(record, config=json.loads(str(record.config)))
        if event.event in STARTS and event.message.startswith(PROCESS):
            event = replace(event, process=event.message.removeprefix(PROCESS), message="")
        events = self._of_services if event.event in SERVICE_EVENTS else self._events
        before = events.setdefault(event.run, [])
        if event not in before:  # a compacted file repeats what was read before
            insort(before, event, key=lambda each: each.at)


ALL_RUNS = "all-runs"
"""The run of a finding for which the rollouts of every run were searched."""
# Enough for the findings of a store, and short enough to be typed.
ID_LENGTH = 12


@dataclass(frozen=True)
class Quarantine:
    """One finding; the columns of the quarantines table."""

    quarantine: str
    """The finding's id: a digest of its rollouts and its reason."""
    run: str
    where: str
    reason: str
    trace_ids: tuple[str, ...]
    at: datetime
    host: str


class Quarantines(NamedRecords):
    """The findings of a store, in memory and kept up to date."""

    contract = QUARANTINES
    record_type = Quarantine
    id_columns = ("quarantine",)

    def record(self, trace_ids: Iterable[str], *, where: str, reason: str, run: str = ALL_RUNS) -> Quarantine:
        """Record that rollouts are unfit, in one row; the same rollouts for the same reason are one finding.

        Returns the finding that stands: the one written, or the earlier one of the same rollouts and reason.
        """
        traces = tuple(sorted(set(trace_ids)))
        name = content_key({"trace_ids": list(traces), "reason": reason})[:ID_LENGTH]
        if name not in self.ids():
            finding = Quarantine(name, run, where, reason, traces, datetime.now(UTC), socket.gethostname())
            self.add_records([finding])
        return next(finding for finding in self.all() if finding.quarantine == name)

    def all(self) -> list[Quarantine]:
        """The findings, in order of time; of one that two writers recorded at once, the earlier row."""
        return sorted(self._all(), key=_age)

    def ids(self) -> list[str]:
        """The ids of all findings, in order of time."""
        return [finding.quarantine for finding in self.all()]

    def reasons(self, quarantines: Sequence[str]) -> dict[str, str]:
        """The reason for each rollout of the findings named; of a rollout in several, the earliest finding's.

        Raises StoreError for an id that the store does not have.
        """
        ids = self.ids()
        if missing := sorted({*quarantines} - {*ids}):
            raise StoreError(
                f"there is no quarantine {missing[0]!r}",
                f"the store has: {', '.join(ids) or 'none'}",
                do="list them with `stagecoach quarantine --list` and give one of these ids",
            )
        chosen = [each for each in self.all() if each.quarantine in quarantines]
        return {trace: each.reason for each in reversed(chosen) for trace in each.trace_ids}

    def _select(self, earlier: Quarantine, later: Quarantine) -> Quarantine:
        # Two writers may record one finding at the same time: for every reader the earlier row stands.
        return min(earlier, later, key=_age)


@dataclass(frozen=True)
class Note:
    """What a person wrote on a run or a rollout; the columns of the notes table."""

    run: str
    note: str
    """Its id."""
    trace_id: str
    """The rollout; empty for a note on the run."""
    tags: tuple[str, ...]
    text: str
    deleted: bool
    at: datetime
    host: str


class Notes(NamedRecords):
    """The notes of a store, in memory and kept up to date. A note that was taken back stays in the table."""

    contract = NOTES_TABLE
    record_type = Note
    id_columns = ("note",)

    def record(self, run: str, text: str, *, tags: Iterable[str] = (), trace_id: str = "") -> Note:
        """Record a note on a run or on one of its rollouts, and return it."""
        now, labels = datetime.now(UTC), tuple(sorted(set(tags)))
        said = {"run": run, "trace_id": trace_id, "text": text, "tags": list(labels), "at": now.isoformat()}
        note = Note(run, content_key(said)[:ID_LENGTH], trace_id, labels, text, False, now, socket.gethostname())
        self.add_records([note])
        return note

    def delete(self, name: str) -> Note:
        """Take a note back by its id, and return it. Raises StoreError where the store has no such note."""
        known = {note.note: note for note in self.all()}
        if name not in known:
            shown = f"the store has: {', '.join(known) or 'none'}"
            raise StoreError(f"there is no note {name!r}", shown, do="list them with `stagecoach note RUN`")
        self.add_records([replace(known[name], deleted=True, at=datetime.now(UTC))])
        return known[name]

    def all(self, run: str = "", trace_id: str | None = None) -> list[Note]:
        """The notes in order of time, of a run and on a rollout alone where they are named; `""` is the run itself."""
        notes = [note for note in self._all() if run in ("", note.run) and trace_id in (None, note.trace_id)]
        return sorted((note for note in notes if not note.deleted), key=lambda note: (note.at, note.note))

    def _select(self, earlier: Note, later: Note) -> Note:
        return earlier if earlier.deleted else later


def _age(finding: Quarantine) -> tuple[object, ...]:
    return finding.at, finding.run, finding.quarantine


@dataclass(frozen=True)
class ExpiredSlice:
    """One slice whose rows were dropped; the columns of the table `retirements`."""

    run: str
    table: str
    attempt: str
    rows: int
    bytes: int
    at: datetime
    hours: int
    """The age in hours from which on the table's rows were dropped."""


class ExpiredSlices(NamedRecords):
    """The expired slices of a store, in memory and kept up to date."""

    contract = EXPIRED_SLICES
    record_type = ExpiredSlice
    id_columns = ("run", "table", "attempt")

    def record(self, pieces: Sequence[Slice], hours: int) -> None:
        """Record that slices expire, those of one run in one commit; those recorded before are left out."""
        now = datetime.now(UTC)
        new = self.exclude(pieces)
        self.add_records([ExpiredSlice(p.run, p.table, p.attempt, p.rows, p.bytes, now, hours) for p in new])

    def exclude(self, pieces: Iterable[Slice]) -> list[Slice]:
        """The slices given without those that expired, in order."""
        with self._lock:
            self._refresh()
            return [piece for piece in pieces if self._name(piece) not in self._records]

    def find(self, pieces: Iterable[Slice]) -> list[ExpiredSlice]:
        """The records of those of the slices given that expired, in order."""
        with self._lock:
            self._refresh()
            return [self._records[name] for name in map(self._name, pieces) if name in self._records]

    def read_error(self, pieces: Sequence[Slice]) -> SliceExpired | None:
        """The error for reading slices of which one expired; None where none did."""
        found = next(iter(self.find(pieces)), None)
        if found is None:
            return None
        return SliceExpired(
            f"these {found.rows} rows were dropped on {found.at:%Y-%m-%d}: table {found.table!r} keeps rows for "
            f"{found.hours} hours",
            f"table {found.table!r}, run {found.run!r}, attempt {found.attempt!r}",
            "every other table of the run; the ledger still says that and how they were made",
            "go without them; to have them again, do the stage's work again in a run with another seed or section",
        )
