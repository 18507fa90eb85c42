"""The command status: live runs of a store, their services on this machine, waiting gates, scheduled runs."""

import json
import os
import socket
import urllib.request
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any

import psutil

from configs.store import default_store
from flows.cli.arguments import Json, StoreOption, option
from flows.queries.run_state import deciding_event, is_going
from flows.queries.runs import steps_done
from flows.queries.store_reader import StoreReader, recorded_run
from flows.reporting.formats import console, grid, moment, say, seconds
from flows.services.ownership import identity, marked_processes, start_time
from storage.records import Event

PREFECT_SECONDS = 2.0
"""How long Prefect may take to say which runs are due; it is left out then."""
MOST_DUE = 3
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
    library = StoreReader.at(store or default_store(), most_bytes=None)
    names = [recorded_run(library.store, run)[0]] if run else library.store.runs.names()
    last = {name: deciding_event(library.store.runs.events(name)) for name in names}
    at_work = [describe(library, name, event) for name, event in last.items() if is_going(event)]
    due = [] if run else next_runs()
    if as_json:
        print(json.dumps({"runs": at_work, "scheduled": due}, sort_keys=True))
    else:
        _print(at_work, due, f"run {names[0]}" if run else f"store {library.store.root.address}")
    return 0 if at_work else 1


def describe(library: StoreReader, run: str, event: Event) -> Row:
    """Return what a live run is doing, as plain values."""
    history = library.history(run)
    steps = list(history.steps.values())
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
        "waits_at_gate": _waits(event, steps[-1]) if steps else None,
        "services": services_of(event) if event.host == socket.gethostname() else [],
    }


def _waits(event: Event, step: Any) -> int | None:
    """Return the step whose batch a person has to approve; None where none is packed and neither judged nor trained."""
    gate = event.config.get("gate")
    asks = isinstance(gate, dict) and gate.get("type") == "pause" and step.step % int(gate.get("every") or 1) == 0
    return step.step if asks and step.batches and not step.decision and not step.updates else None


def services_of(event: Event) -> list[Row]:
    """Return the services that a run's process on this machine owns: name, process id, state, memory."""
    found: dict[str, Row] = {}
    if start_time(event.pid) is None:
        return []
    owner = identity(event.pid)
    for pid, of, service in marked_processes():
        # Of several processes of a service the first started it.
        if of == owner and service and pid != event.pid and service not in found:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                found[service] = {"service": service, "pid": pid, "state": process.status()}
    return list(found.values())


def next_runs() -> list[Row]:
    """Return the next scheduled runs of the Prefect server that is configured; none where none is, or none answers."""
    url = os.environ.get("PREFECT_API_URL", "")
    if not url.startswith(("http://", "https://")):
        return []
    asked = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}, "sort": "EXPECTED_START_TIME_ASC"}
    request = urllib.request.Request(
        f"{url.rstrip('/')}/flow_runs/filter",
        json.dumps(asked | {"limit": MOST_DUE}).encode(),
        {"Content-Type": "application/json"},
    )
    with suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=PREFECT_SECONDS) as answer:
        return [{"name": str(each["name"]), "at": str(each["expected_start_time"])} for each in json.load(answer)]
    return []


def _print(at_work: list[Row], due: list[Row], where: str) -> None:
    if not at_work:
        say(f"nothing is at work in {where}")
    for row in at_work:
        ago = seconds((datetime.now(UTC) - datetime.fromisoformat(row["since"])).total_seconds())
        steps = f", {row['steps_done']}/{row['steps_planned']} steps" if row["steps_planned"] is not None else ""
        say(f"{row['kind']} {row['run']}: going{steps}, since {moment(row['since'])} UTC ({ago})")
        say(f"process   {row['pid']} on {row['host']}")
        if row["last_stage"]:
            say(f"finished  {row['last_stage']} of step {row['last_step']} at {moment(row['last_at'])}")
        if row["waits_at_gate"] is not None:
            say(f"waits     at the gate of step {row['waits_at_gate']}: `stagecoach gate {row['run']} --approve`")
        if row["services"]:
            console().print(grid(("service", "process", "state"), (each.values() for each in row["services"])))
    for each in due:
        say(f"scheduled {each['name']} at {moment(each['at'])} UTC")
