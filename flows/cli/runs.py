"""Commands about runs of a store: runs (a list), status and watch of live ones, and stop."""

import os
import signal
import socket
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.store import default_store
from flows.cli.arguments import (
    Json,
    Plain,
    RunOrLatest,
    StoreOption,
    UsageError,
    open_reader,
    stored_run,
)
from flows.cli.output import Record, print_records, print_report
from flows.reporting.formats import compact_number, paint, say, seconds, size

if TYPE_CHECKING:
    from flows.queries.store_reader import StoreReader
    from storage.records import Event

Row = dict[str, Any]
LOOK_SECONDS = 2.0
"""Time between two readings of the store."""
PROGRAMS = {"stagecoach", "flows.cli", "prefect.flow_engine", "prefect.engine"}
"""What a process of a run was started as: a command of this program, or a flow run of Prefect's worker."""
STOP_SECONDS = 120.0
"""How long `stop` waits for a run to end."""


def runs(
    *,
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the runs of a store, the newest last. Raises LayoutError without a store; none is made."""
    from flows.queries.runs import runs as recorded_runs

    rows = recorded_runs(open_reader(store)).to_dicts()
    print_records(rows, _cells, (0, 1, 2), as_json, num_optional=3)
    if not (rows or as_json):
        say("no runs")
    return 0


def _cells(row: Record) -> Record:
    rewards = [compact_number(reward) for reward in row["rewards"] if reward is not None]
    ago = (datetime.now(UTC) - row["changed_at"]).total_seconds()  # negative where another machine's clock is ahead
    return {
        "run": " ".join([row["run"], *(f"#{tag}" for tag in row["tags"])]),
        "kind": row["kind"],
        "state": paint(row["state"], row["look"]),
        "steps": f"{row['steps_done']}/{row['steps_planned'] or '-'}",
        "reward": " to ".join(dict.fromkeys(rewards[:1] + rewards[-1:])) or "-",
        "held out": compact_number(row["held_out"]),
        "age": " ".join(seconds(max(ago, 0.0)).split()[:2]),  # in its larger unit
        "size": size(row["bytes"]),
        "took": seconds(row["seconds"]),
    }


def status(*, store: StoreOption = "", as_json: Json = False) -> int:
    """Print the live runs of a store; return 0 if a run is live, else 1. Raises LayoutError without a store."""
    from flows.queries.run_state import deciding_event, is_going

    reader = open_reader(store)
    events = {name: deciding_event(reader.store.runs.events(name)) for name in reader.store.runs.names()}
    live = [describe(reader, name, event) for name, event in events.items() if is_going(event)]
    print_report({"runs": live}, as_json)
    if not (live or as_json):
        say(f"no live runs in {store or default_store()}")
    return 0 if live else 1


def describe(reader: "StoreReader", run: str, event: "Event") -> Row:
    """Return the state of a live run as plain values; `services` are the processes on this machine by name."""
    from flows.queries.runs import steps_done
    from flows.services.ownership import marked_processes, start_time

    history = reader.history(run)
    owner = f"{event.pid}:{start_time(event.pid)}" if event.host == socket.gethostname() else None
    services = [(service, pid) for pid, parent, service in marked_processes() if parent == owner and service]
    return {
        "run": run,
        "kind": event.kind,
        "steps_done": steps_done(history.sampled_steps, event.config),
        "steps_planned": event.config.get("steps") if event.kind != "evaluate" else None,
        "since": event.at.isoformat(timespec="seconds"),
        "process": f"{event.pid} on {event.host}",
        "waits_at_gate": _gate_step(event.config.get("gate"), list(history.steps.values())),
        "services": dict(reversed(services)),  # the first of several processes started the others
        "joined_engines": reader.store.runs.joined_engines(run),
    }


def _gate_step(gate: Any, steps: list[Any]) -> int | None:
    """Return the step whose batch a person has to approve; None where none is packed and neither judged nor trained."""
    if not (steps and isinstance(gate, dict) and gate.get("type") == "pause"):
        return None
    last = steps[-1]
    waits = last.step % int(gate.get("every") or 1) == 0 and last.batches and not last.decision and not last.updates
    return int(last.step) if waits else None


def watch(run: RunOrLatest = "latest", /, *, store: StoreOption = "", plain: Plain = False) -> int:
    """Show a run until it ends, then print its result. Raises ConfigError for an unknown run, LayoutError."""
    from flows.cli.run import panel_for
    from flows.queries.run_state import deciding_event, is_going, state_of
    from flows.queries.store_reader import StoreReader
    from flows.queries.watched import Watched
    from flows.reporting.panel import printable

    reader, name, config = stored_run(store, run)
    watched = Watched(StoreReader(reader.store), name, config)  # holds within a bound: a run may take days
    with panel_for(config, plain) as panel:
        while True:
            last = deciding_event(reader.store.runs.events(name))
            watched.show(panel)
            if not is_going(last):
                break
            time.sleep(LOOK_SECONDS)
    state = state_of(last)
    print(": ".join(filter(None, (f"run {name}", state["state"], printable(state["message"])))))
    for line in watched.summary():
        print(line)
    return 0


def stop(run: RunOrLatest, /, *, store: StoreOption = "") -> int:
    """Tell every process of a run on this machine to end, wait until all have, and print the run's state; return 0.

    What is committed stays, and the run can be resumed. Returns 1 where a process is left: one that takes longer than
    STOP_SECONDS to end, one of another machine, one of another program. Raises UsageError where no process is to be
    ended here, ConfigError for an unknown run.
    """
    from flows.queries.run_state import state_of
    from flows.services.ownership import live_processes, writer_alive

    reader, name, _ = stored_run(store, run)
    processes = live_processes(reader.store.runs.events(name))
    # A store may come from anywhere, and with it the process ids in it.
    stopped = [process for process in processes if process.host == socket.gethostname() and _is_program(process.pid)]
    left = [process for process in processes if process not in stopped]
    if not stopped:
        state = state_of(reader.store.runs.events(name)[-1])["state"]
        raise UsageError(f"run {name!r} has no process to end here: {_names(left) or state}")
    for process in stopped:
        os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while any(map(writer_alive, stopped)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left += filter(writer_alive, stopped)
    state = state_of(reader.store.runs.events(name)[-1])["state"]
    say(f"{name}: {state}; committed work is safe, `stagecoach resume {name}` continues")
    if left:
        say(f"{name}: still running: {_names(left)}")
    return 1 if left else 0


def _names(processes: "Iterable[Event]") -> str:
    """Return processes of another machine or another program, or that are still ending, with what to do."""
    named = "; ".join(f"process {process.pid} on {process.host}" for process in processes)
    return named and f"{named}: end it there, or cancel it in Prefect"


def _is_program(pid: int) -> bool:
    import psutil

    try:
        words = psutil.Process(pid).cmdline()[:3]  # Python, perhaps -m, and what it runs
    except psutil.Error:
        return False
    return any(Path(word).name in PROGRAMS for word in words)
