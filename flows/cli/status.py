"""The command status: live runs of a store, their services on this machine, waiting gates, scheduled runs."""

import json
import os
import socket
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from flows.cli.arguments import Json, StoreOption, open_reader, option, stored_run
from flows.reporting.formats import console, grid, moment, say, seconds

if TYPE_CHECKING:
    from flows.queries.store_reader import StoreReader
    from storage.records import Event

PREFECT_SECONDS = 2.0
"""Longest wait for Prefect's scheduled runs, which are then left out."""
MAX_SCHEDULED = 3
Row = dict[str, Any]


def status(
    run: Annotated[str, option("only this run, `latest` for the newest", "RUN")] = "",
    /,
    *,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the live runs of a store, or one of them; return 0 if a run is live, else 1.

    Raises ConfigError for an unknown run, LayoutError without a store; none is made.
    """
    from flows.queries.run_state import deciding_event, is_going

    if run:
        reader, name, _ = stored_run(store, run)
        names = [name]
    else:
        reader = open_reader(store)
        names = reader.store.runs.names()
    events = {name: deciding_event(reader.store.runs.events(name)) for name in names}
    live = [describe(reader, name, event) for name, event in events.items() if is_going(event)]
    scheduled = [] if run else next_runs()
    if as_json:
        print(json.dumps({"runs": live, "scheduled": scheduled}, sort_keys=True))
    else:
        _print(live, scheduled, f"run {names[0]}" if run else f"store {reader.store.root.address}")
    return 0 if live else 1


def describe(reader: "StoreReader", run: str, event: "Event") -> Row:
    """Return the state of a live run as plain values."""
    from flows.queries.runs import steps_done

    history = reader.history(run)
    works = [work for work in history.own.works.values() if work.finished]
    newest = max(works, key=lambda work: work.age, default=None)
    planned = event.config.get("steps")
    return {
        "run": run,
        "kind": event.kind,
        "steps_done": steps_done(history.sampled_steps, event.config),
        "steps_planned": planned if isinstance(planned, int) and event.kind != "evaluate" else None,
        "since": event.at.isoformat(),
        "host": event.host,
        "pid": event.pid,
        "last_stage": newest.stage if newest else None,
        "last_step": newest.step if newest else None,
        "last_at": newest.entry.finished_at.isoformat() if newest else None,
        "waits_at_gate": _gate_step(event.config.get("gate"), list(history.steps.values())),
        "services": services_of(event) if event.host == socket.gethostname() else [],
    }


def _gate_step(gate: Any, steps: list[Any]) -> int | None:
    """Return the step whose batch a person has to approve; None where none is packed and neither judged nor trained."""
    if not (steps and isinstance(gate, dict) and gate.get("type") == "pause"):
        return None
    last = steps[-1]
    waits = last.step % int(gate.get("every") or 1) == 0 and last.batches and not last.decision and not last.updates
    return int(last.step) if waits else None


def services_of(event: "Event") -> list[Row]:
    """Return the services that a run's process on this machine owns: name, process id, state."""
    import psutil

    from flows.services.ownership import identity, marked_processes, start_time

    if start_time(event.pid) is None:
        return []
    services: dict[str, Row] = {}
    run_owner = identity(event.pid)
    for pid, owner, service in marked_processes():
        # The first of several processes of a service started it.
        if owner == run_owner and service and pid != event.pid and service not in services:
            with suppress(psutil.Error):
                services[service] = {"service": service, "pid": pid, "state": psutil.Process(pid).status()}
    return list(services.values())


def next_runs() -> list[Row]:
    """Return the next scheduled runs of the Prefect server that is configured; none where none is, or none answers."""
    url = os.environ.get("PREFECT_API_URL", "")
    if not url.startswith(("http://", "https://")):
        return []
    scheduled = {"state": {"type": {"any_": ["SCHEDULED"]}}}
    query = {"flow_runs": scheduled, "sort": "EXPECTED_START_TIME_ASC", "limit": MAX_SCHEDULED}
    address, headers = f"{url.rstrip('/')}/flow_runs/filter", {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(query).encode(), headers)
    with suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=PREFECT_SECONDS) as response:
        return [{"name": str(run["name"]), "at": str(run["expected_start_time"])} for run in json.load(response)]
    return []


def _print(live: list[Row], scheduled: list[Row], where: str) -> None:
    if not live:
        say(f"nothing is at work in {where}")
    for row in live:
        ago = seconds((datetime.now(UTC) - datetime.fromisoformat(row["since"])).total_seconds())
        steps = f", {row['steps_done']}/{row['steps_planned']} steps" if row["steps_planned"] is not None else ""
        say(f"{row['kind']} {row['run']}: going{steps}, since {moment(row['since'])} UTC ({ago})")
        say(f"process   {row['pid']} on {row['host']}")
        if row["last_stage"]:
            say(f"finished  {row['last_stage']} of step {row['last_step']} at {moment(row['last_at'])}")
        if row["waits_at_gate"] is not None:
            say(f"waits     at the gate of step {row['waits_at_gate']}: `stagecoach gate {row['run']} --approve`")
        if row["services"]:
            console().print(grid(("service", "process", "state"), (service.values() for service in row["services"])))
    for run in scheduled:
        say(f"scheduled {run['name']} at {moment(run['at'])} UTC")
