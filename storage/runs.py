"""Runs: their events and their resolved configs."""

import json
import os
import socket
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

from storage.delta.cached_table import CachedTable
from storage.delta.table import StoredTable
from storage.errors import RunUnknown
from storage.keys import canonical_json
from storage.roots import Root
from storage.schemas.system_tables import RUNS
from storage.slices import check_run_name

REMOVED = "removed"
"""The event of a run whose work was removed from the store; its name may be used again."""
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


class Runs(CachedTable):
    """The events of all runs, in memory and kept up to date."""

    def __init__(self, root: Root) -> None:
        super().__init__(root, RUNS)
        self.table = StoredTable(root, RUNS.name, RUNS.arrow)  # every store has it from the first
        self._events: dict[str, list[Event]] = {}

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
    ) -> Event:
        """Record an event now. Kind, config and parent default to the run's last event's, host and pid to ours.

        Raises RunUnknown where a first event brings no kind or config.
        """
        check_run_name(run)
        before = self._events_of(run)
        if (kind is None or config is None) and not before:
            raise RunUnknown(f"run {run!r} has no earlier event to take kind and config from", do="give both")
        recorded = Event(
            run=run,
            event=event,
            at=datetime.now(UTC),
            kind=before[-1].kind if kind is None else kind,
            config=before[-1].config if config is None else config,
            parent_run=before[-1].parent_run if parent_run is None and before else parent_run,
            step=step,
            message=message,
            flow_run=flow_run,
            host=socket.gethostname() if host is None else host,
            pid=os.getpid() if pid is None else pid,
        )
        self.add_records([recorded])
        return recorded

    def events(self, run: str) -> list[Event]:
        """The events of a run in order of time; RunUnknown if there are none."""
        found = self._events_of(run)
        if not found:
            raise RunUnknown(f"there is no run {run!r}", self.similar_names(run), do="give one of these names")
        return found

    def similar_names(self, run: str) -> str:
        """Say, for an error, which runs have a name like this one; where none has, which runs are the newest."""
        names = self.names()
        alike = get_close_matches(run, names, MAX_SUGGESTIONS)
        return (
            f"the nearest runs are: {', '.join(alike)}"
            if alike
            else f"the last runs are: {', '.join(names[-MAX_SUGGESTIONS:]) or 'none'}"
        )

    def last(self, run: str) -> Event | None:
        """The newest event of a run; None where there are none."""
        return next(reversed(self._events_of(run)), None)

    def names(self) -> list[str]:
        """The names of all runs, in order of their last event."""
        with self._lock:
            self._refresh()
            return sorted(self._events, key=lambda run: (self._events[run][-1].at, run))

    def latest(self) -> str | None:
        """The run with the newest event, but those removed; None in an empty store."""
        return next((run for run in reversed(self.names()) if self._events_of(run)[-1].event != REMOVED), None)

    def config(self, run: str) -> dict[str, Any]:
        """The resolved config that the run used last."""
        return dict(self.events(run)[-1].config)

    def _events_of(self, run: str) -> list[Event]:
        with self._lock:
            self._refresh()
            return list(self._events.get(run, []))

    def _row(self, record: Event) -> Mapping[str, Any]:
        return {**vars(record), "config": canonical_json(record.config)}

    def _add_row(self, row: dict[str, Any]) -> None:
        event = Event(**{**row, "config": json.loads(row["config"])})
        before = self._events.setdefault(event.run, [])
        if event not in before:  # a compacted file repeats what was read before
            insort(before, event, key=lambda each: each.at)
