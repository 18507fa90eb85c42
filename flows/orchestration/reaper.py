"""The reaper: runs of this machine that say they are at work although their process is gone are marked as crashed.

A process that was killed cannot write down its end. Runs of other machines cannot be judged from here.
"""

import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flows.orchestration.endings import OPEN
from flows.processes.ownership import start_time
from storage.store import Store

SLACK = timedelta(seconds=2)
"""The kernel's boot time is known to the second only."""


def mark_crashed(store: Store) -> list[str]:
    """Write the event `crashed` for every run of this host whose process is gone; return their names."""
    marked = []
    for run in store.runs.names():
        last = store.runs.events(run)[-1]
        if last.event in OPEN and last.host == socket.gethostname() and not lives(last.pid, last.at):
            told = f"process {last.pid} is gone. Everything committed is safe; the same run again goes on from there"
            store.runs.record(
                run=run, event="crashed", message=told, flow_run=last.flow_run, host=last.host, pid=last.pid
            )
            marked.append(run)
    return marked


def lives(process: int, at: datetime) -> bool:
    """Tell whether the process that had this id at a moment is still there; ids recur."""
    ticks = start_time(process)
    return ticks is not None and _moment(int(ticks)) <= at + SLACK


def _moment(ticks: int) -> datetime:
    """Return when a process started, from clock ticks since boot."""
    lines = Path("/proc/stat").read_text().splitlines()
    boot = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    return datetime.fromtimestamp(boot + ticks / os.sysconf("SC_CLK_TCK"), UTC)
