"""Commands for the runs of a store: runs (a list), logs and stop."""

import json
import os
import signal
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.text import Text

from configs.errors import did_you_mean
from flows.cli.arguments import Count, Json, RunOrLatest, StoreOption, UsageError, open_reader, option, stored_run
from flows.reporting.formats import compact_number, console, grid, paint, say, seconds, size

Row = dict[str, Any]


def runs(
    *,
    kind: Annotated[Literal["train", "sft", "evaluate", "replay"] | None, option("only runs of this kind")] = None,
    state: Annotated[str, option("only runs in this state, for example going, finished or failed")] = "",
    store: StoreOption = "",
    as_json: Json = False,
) -> int:
    """Print the runs of a store, the newest last. Raises LayoutError without a store; none is made."""
    from flows.queries.runs import runs as recorded_runs

    rows = recorded_runs(open_reader(store)).to_dicts()
    rows = [row for row in rows if kind in (None, row["kind"]) and state in ("", row["state"])]
    if as_json:
        print(json.dumps(rows, default=datetime.isoformat))
        return 0
    headings = ("run", "kind", "state", "steps", "reward", "held out", "age", "took", "size")
    console().print(grid(headings, map(_cells, rows), left=(0, 1, 2), num_spare=2) if rows else "no runs")
    return 0


def _cells(row: Row) -> tuple[str | Text, ...]:
    rewards = [compact_number(reward) for reward in row["rewards"] if reward is not None]
    ago = (datetime.now(UTC) - row["changed_at"]).total_seconds()
    return (
        " ".join([row["run"], *(f"#{tag}" for tag in row["tags"])]),
        row["kind"],
        paint(row["state"], row["look"]),
        f"{row['steps_done']}/{row['steps_planned']}" if row["steps_planned"] is not None else str(row["steps_done"]),
        " to ".join(dict.fromkeys(rewards[:1] + rewards[-1:])) or "-",
        compact_number(row["held_out"]),
        seconds(max(ago, 0.0)),
        seconds(row["seconds"]),
        size(row["bytes"]),
    )


def logs(
    run: RunOrLatest = "latest",
    service: Annotated[str, option("only this service: engine, learner, environment-NAME, ...", "SERVICE")] = "",
    /,
    *,
    lines: Annotated[Count, option("number of last lines of each service")] = 40,
    follow: Annotated[bool, option("print new lines as they come, until Ctrl-C")] = False,
    store: StoreOption = "",
) -> int:
    """Replace this process by `tail` of the logs of a run's services.

    Raises ConfigError for an unknown run, UsageError if the run has no such log on this machine.
    """
    from storage.roots import check_links

    reader, name, _ = stored_run(store, run)
    directory, logs = reader.store.root.directory, list[Path]()
    if directory is not None:
        check_links(directory, f"logs/{name}")
        logs = sorted((directory / "logs" / name).glob("*.log"))
    files = [str(path) for path in logs if service in ("", path.stem)]
    if not files:
        services = ", ".join(path.stem for path in logs) or "none on this machine"
        near = did_you_mean(service, (path.stem for path in logs))
        raise UsageError(f"run {name!r} has no log of {service or 'a service'}; there is: {services}{near}")
    os.execvp("tail", ["tail", "-n", str(lines), *(["-F"] if follow else []), "--", *files])


PROGRAMS = {"stagecoach", "flows.cli", "prefect.flow_engine", "prefect.engine"}
"""What a process that is a run was started as: a command of this program, or a flow run of Prefect's worker."""
STOP_SECONDS = 120.0
"""How long a run has to end in order; it goes on ending after that, unwatched."""


def stop(run: RunOrLatest, /, *, store: StoreOption = "") -> int:
    """Tell every process of a run on this machine to end, wait until all have, and print the run's state; return 0.

    What is committed stays, and the run can be resumed. Returns 1 where a process still works on it: one that takes
    longer than STOP_SECONDS to end, one of another machine, one of another program. Raises UsageError where no process
    is to be ended here, ConfigError for an unknown run.
    """
    from flows.queries.run_state import state_of
    from flows.services.ownership import live_processes, writer_alive

    reader, name, _ = stored_run(store, run)
    processes = live_processes(reader.store.runs.events(name))
    if not processes:
        raise UsageError(f"run {name!r} is not at work: {state_of(reader.store.runs.events(name)[-1])['state']}")
    stopped, left = [], []
    for process in processes:
        if process.host != socket.gethostname():
            left.append(f"process {process.pid} on {process.host}: call this there, or cancel its flow run in Prefect")
        # A store may come from anywhere, and with it the process ids in it.
        elif not _is_program(process.pid):
            left.append(f"process {process.pid}, which is none of stagecoach: end it yourself")
        else:
            stopped.append(process)
    if not stopped:
        raise UsageError(f"run {name!r} is at work in {'; '.join(left)}")
    for process in stopped:
        os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while any(map(writer_alive, stopped)) and time.monotonic() < deadline:
        time.sleep(0.1)
    ending = [process for process in stopped if writer_alive(process)]
    left += [f"process {process.pid}, which is still ending" for process in ending]
    state = "still ending" if ending else state_of(reader.store.runs.events(name)[-1])["state"]
    say(f"{name}: {state}; what is committed is safe, `stagecoach resume {name}` goes on from there")
    for text in left:
        say(f"{name}: still at work in {text}")
    return 1 if left else 0


def _is_program(pid: int) -> bool:
    import psutil

    try:
        words = psutil.Process(pid).cmdline()[:3]  # Python, perhaps -m, and what it runs
    except psutil.Error:
        return False
    return any(Path(word).name in PROGRAMS for word in words)
