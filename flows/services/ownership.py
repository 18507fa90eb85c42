"""Which processes belong to which flow, and the sweep of those whose flow is gone.

Every process of a service carries `STAGECOACH_OWNER=<pid>:<start time of that pid>` in its environment. A process id
alone would not do: ids recur. Linux only.
"""

import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from flows.services.guardian import send
from storage.records import STARTS, Event

OWNER = "STAGECOACH_OWNER"
SERVICE = "STAGECOACH_SERVICE"
# What does not go at SIGKILL for so long hangs in the kernel; waiting longer would not help.
SWEEP_SECONDS = 10.0


def start_time(process: int) -> str | None:
    """Return when a process started, in clock ticks since boot, or None when it is gone or dead and not collected."""
    # Not psutil's create_time: that is seconds of the wall clock, which is set now and then, and then the processes of
    # a living flow would look like those of a dead one to another flow, which would kill them.
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A zombie does nothing any more and only waits to be collected.
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def identity() -> str:
    """Return `<pid>:<start time>` of this process."""
    return f"{os.getpid()}:{start_time(os.getpid())}"


def boot_id() -> str:
    """Return the id of this machine's present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def recorded_identity() -> str:
    """Return `<boot id>:<pid>:<start time>` of this process, to be recorded: it names no other process, ever."""
    return f"{boot_id()}:{identity()}"


def is_alive(owner: str) -> bool:
    """Tell whether the very process that an identity names is still there."""
    process, _, started = owner.partition(":")
    return process.isdigit() and start_time(int(process)) == started


def writer_alive(event: Event) -> bool:
    """Tell whether the process of this host that wrote a start or resumption of a run still lives.

    By boot id, process id and start ticks, however the clock was set meanwhile; by process id alone where an older
    version has recorded no more.
    """
    if not event.process:
        return bool(psutil.pid_exists(event.pid))
    boot, _, process = event.process.partition(":")
    return boot == boot_id() and is_alive(process)


def live_processes(events: Iterable[Event]) -> list[Event]:
    """Return the last event of each process that is at work on a run, given all events of the run.

    A process of another host counts as alive until it has recorded its end: it cannot be seen from here.
    """
    last = {(event.host, event.pid): event for event in events}
    going = (event for event in last.values() if event.event in STARTS)
    return [event for event in going if event.host != socket.gethostname() or writer_alive(event)]


def _namespace(process: int | str) -> str | None:
    try:
        return os.readlink(f"/proc/{process}/ns/pid")
    except OSError:
        return None


def marked_processes() -> Iterator[tuple[int, str, str]]:
    """Yield process id, owner and service of every living marked process of this user and process-id namespace.

    Process ids inside a container mean nothing outside it, so another namespace's processes are left alone.
    """
    here = _namespace("self")
    for process in psutil.process_iter(["environ"]):
        environment = process.info["environ"] or {}  # None where it is not ours to read
        if OWNER in environment and _namespace(process.pid) == here and start_time(process.pid) is not None:
            yield process.pid, environment[OWNER], environment.get(SERVICE, "")


def owned_processes(owner: str, service: str | None = None) -> list[int]:
    """Return the living processes of an owner's services, or of one of them, guardians included.

    The owner itself is left out, although a flow that is a service of another flow is marked too.
    """
    return [
        process
        for process, of, name in marked_processes()
        if of == owner and process != os.getpid() and service in (None, name)
    ]


def kill_owned(owner: str, service: str | None = None) -> None:
    """Kill an owner's processes, or those of one service, until none is left."""
    deadline = time.monotonic() + SWEEP_SECONDS
    # Again and again: one that forks just now is not in the list.
    while (left := owned_processes(owner, service)) and time.monotonic() < deadline:
        send(signal.SIGKILL, left)
        time.sleep(0.02)


def sweep() -> None:
    """Kill every process whose flow is gone, and wait until it is.

    There is nothing to lose in them: what a flow wants to keep is in its store. Run before services are started, it
    also frees the memory of an engine whose guardian was killed.
    """
    for owner in sorted({owner for _, owner, _ in marked_processes() if not is_alive(owner)}):
        kill_owned(owner)
