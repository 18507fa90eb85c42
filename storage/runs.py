"""Runs: their events and their resolved configs."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from storage.books import RUNS
from storage.errors import RunUnknown
from storage.keys import canonical
from storage.roots import Root
from storage.slices import check_run_name
from storage.tables import StoredTable

REMOVED = "removed"
"""The event of a run whose work was removed from the store; its name may be used again."""


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


class Runs:
    """The events of all runs, held in memory and moved forward by what was added since."""

    def __init__(self, root: Root) -> None:
        self.table = StoredTable(root, RUNS.name, RUNS.arrow)
        self._lock = self.table.lock
        self._version: int | None = None
        self._known: set[str] = set()
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
        """Write down an event now. Kind, config and parent default to the run's last event's, host and pid to ours.

        Raises RunUnknown where a first event brings no kind or config.
        """
        check_run_name(run)
        before = self._of(run)
        if (kind is None or config is None) and not before:
            raise RunUnknown(f"run {run!r} has no earlier event to take kind and config from", do="give both")
        noted = Event(
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
        row = pa.Table.from_pylist([{**vars(noted), "config": canonical(noted.config)}], RUNS.arrow)
        self.table.append(row.drop_columns(["run"]), run)
        return noted

    def events(self, run: str) -> list[Event]:
        """The events of a run in order of time; RunUnknown if there are none."""
        found = self._of(run)
        if not found:
            known = ", ".join(self.names()[-5:]) or "none"
            raise RunUnknown(f"there is no run {run!r}", f"the last runs are: {known}", do="give one of these names")
        return found

    def names(self) -> list[str]:
        """The names of all runs, in order of their last event."""
        with self._lock:
            self._refresh()
            return sorted(self._events, key=lambda run: (self._events[run][-1].at, run))

    def latest(self) -> str | None:
        """The run with the newest event, but those removed; None in an empty store."""
        return next((run for run in reversed(self.names()) if self._of(run)[-1].event != REMOVED), None)

    def config(self, run: str) -> dict[str, Any]:
        """The resolved config that the run used last."""
        return dict(self.events(run)[-1].config)

    def _of(self, run: str) -> list[Event]:
        with self._lock:
            self._refresh()
            return list(self._events.get(run, []))

    def _refresh(self) -> None:
        paths, version = self.table.added(self._version)
        touched = set()
        for path in paths:
            if path in self._known:
                continue
            run = path.split("/")[0].removeprefix("run=")
            for row in self.table.read(path).to_pylist():
                parsed = {"run": run, "at": row["at"].astimezone(UTC), "config": json.loads(row["config"])}
                event = Event(**{**row, **parsed})
                if event not in self._events.setdefault(run, []):  # a compacted file repeats what was read before
                    self._events[run].append(event)
            self._known.add(path)
            touched.add(run)
        for run in touched:
            self._events[run].sort(key=lambda event: event.at)
        self._version = version
