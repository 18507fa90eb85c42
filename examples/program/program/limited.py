"""Runs a command within limits, and leaves no process of it behind.

`limited.py SECONDS BYTES MEMORY NAMES PORTS INPUT COMMAND ...`: the command gets the variables NAMES, and no others.
Its standard input is the file INPUT; with `-` it has this process's own input and output, and its errors alone count.
PORTS of the loopback are all that it reaches of the network; with `all` it has the machine's.

This process's own input is a pipe that the environment server holds: its end, by will or by death, ends the command.
Orphans of the command come to this process, a child subreaper. It prints the last of what the command printed, and
exits with its status, 128 plus the number after a signal. It uses the standard library only, to be up in some 30 ms.
Linux only.
"""

import contextlib
import ctypes
import fcntl
import functools
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

LIFELINE = 0
LOOPBACK = "127.0.0.1"
PR_SET_CHILD_SUBREAPER = 36
NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000
"""Of users, processes and networks: CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET."""
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
NUM_KEPT = 2000
"""Bytes at the end of a command's output that are passed on."""
LOOK_MILLISECONDS = 20
DRAIN_SECONDS = 0.2
"""Time for what a command printed before its end; a child that it left may print for ever."""


def watch(process: "subprocess.Popen[bytes]", seconds: float, num_bytes: int) -> str:
    """Pass on the end of what a process prints; return why it has to be ended, nothing where it ended by itself."""
    deadline, total, last = time.monotonic() + seconds, 0, b""
    output = stream.fileno() if (stream := process.stderr or process.stdout) else -1
    problem, drained = None, float("inf")
    streams = select.poll()
    streams.register(LIFELINE, 0)  # its end alone: a command may read from it
    streams.register(output, select.POLLIN)
    while problem is None:
        is_over = process.poll() is not None  # before the look at its output: what it printed last is then there
        ready = dict(streams.poll(LOOK_MILLISECONDS))
        if LIFELINE in ready:
            problem = "its rollout ended"
        if output in ready:
            part = os.read(output, 65536)
            total, last = total + len(part), (last + part)[-NUM_KEPT:]
            if not part:
                streams.unregister(output)
        if total > num_bytes:
            problem = f"it printed more than {num_bytes} bytes"
        elif time.monotonic() > deadline:
            problem = f"it took more than {seconds:g} s"
        elif is_over:
            drained = min(drained, time.monotonic() + DRAIN_SECONDS)
            if not ready.get(output, 0) & select.POLLIN or time.monotonic() > drained:
                problem = problem or ""
    os.write(2, last)
    return problem


def children() -> Iterator[int]:
    """Yield the children of this process."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    yield int(name)
        except (FileNotFoundError, ProcessLookupError):
            continue  # gone since it was listed


def kill_all() -> None:
    """Kill children until there are none: those of a killed one become this process's."""
    while True:
        for child in children():
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def isolate(ports: Sequence[int], channel: socket.socket) -> None:
    """Leave the machine's network and processes, between fork and exec; raise OSError where the system refuses that.

    Listeners at `ports` of the new loopback go through `channel`. The command is the first of the new processes, so
    that all others end with it; its parent waits for it, and takes its status.
    """
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None).unshare(NEW_NAMESPACES):
        raise OSError("no namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    with socket.socket() as link:
        fcntl.ioctl(link, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    listeners = [socket.create_server((LOOPBACK, port)) for port in ports]
    socket.send_fds(channel, [b"-"], [listener.fileno() for listener in listeners])
    if child := os.fork():
        os.closerange(3, 256)  # one of them tells the parent of the command's start
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)


def relay(listener: socket.socket, port: int) -> None:
    """Join each connection to a listener inside to one to the same port outside."""
    while True:
        inside, _ = listener.accept()
        try:
            outside = socket.create_connection((LOOPBACK, port))
        except OSError:  # that server is away; it may be back for a later connection
            inside.close()
            continue
        for ends in ((inside, outside), (outside, inside)):
            threading.Thread(target=pump, args=ends, daemon=True).start()


def pump(source: socket.socket, target: socket.socket) -> None:
    """Pass on what a connection sends, and its end."""
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)


def start(command: Sequence[str], names: str, ports: str, source: str) -> "subprocess.Popen[bytes]":
    """Start the command with its variables, its network and its input; raise OSError where it cannot be started."""
    variables = {name: os.environ[name] for name in names.split(",") if name in os.environ}
    numbers = [] if ports == "all" else [int(port) for port in ports.split(",")]
    ours, theirs = socket.socketpair()
    enter = functools.partial(isolate, numbers, theirs) if numbers else None
    file = None if source == "-" else open(source, "rb")  # noqa: SIM115  # until the command is over
    out, error = (subprocess.PIPE, subprocess.STDOUT) if file else (None, subprocess.PIPE)
    process = subprocess.Popen(command, stdin=file, stdout=out, stderr=error, env=variables, preexec_fn=enter)
    for port, listener in zip(numbers, socket.recv_fds(ours, 1, len(numbers))[1] if numbers else (), strict=True):
        threading.Thread(target=relay, args=(socket.socket(fileno=listener), port), daemon=True).start()
    return process


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the status to exit with."""
    seconds, num_bytes, memory, names, ports, source, *command = arguments
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this system has no child subreapers")
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    status = 1
    try:
        process = start(command, names, ports, source)
        problem = watch(process, float(seconds), int(num_bytes))
        if problem:
            sys.stderr.write(f"\nthe program was ended: {problem}\n")
        elif process.returncode is not None:
            status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    except (OSError, subprocess.SubprocessError) as problem:  # the second: the system refuses namespaces
        sys.stderr.write(f"{command[0]} cannot be started: {problem}\n")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_all()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
