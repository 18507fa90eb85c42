"""Runs a command within limits, and leaves no process of it behind: `limited.py SECONDS BYTES NAMES COMMAND ...`.

The command gets the variables NAMES, and no others; `prompt.txt` is its standard input. This process's own input is a
pipe that the environment server holds: its end, by will or by death, ends the command. Orphans of the command come to
this process, a child subreaper. It prints the last of what the command printed, and exits with its status, 128 plus
the number after a signal. It uses the standard library only, to be up in some 30 ms. Linux only.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

LIFELINE = 0
PR_SET_CHILD_SUBREAPER = 36
NUM_KEPT = 2000
"""Bytes at the end of a command's output that are passed on."""
LOOK_SECONDS = 0.02
DRAIN_SECONDS = 0.2
"""Time for what a command printed before its end; a child that it left may print for ever."""


def watch(process: "subprocess.Popen[bytes]", seconds: float, num_bytes: int) -> str:
    """Pass on the end of what a process prints; return why it has to be ended, nothing where it ended by itself."""
    deadline, total, last = time.monotonic() + seconds, 0, b""
    output = process.stdout.fileno() if process.stdout else -1
    streams = [LIFELINE, output]
    problem, drained = None, float("inf")
    while problem is None:
        is_over = process.poll() is not None  # before the look at its output: what it printed last is then there
        ready = select.select(streams, [], [], LOOK_SECONDS)[0]
        if LIFELINE in ready:
            problem = "its rollout ended"
        if output in ready:
            part = os.read(output, 65536)
            total, last = total + len(part), (last + part)[-NUM_KEPT:]
            streams = streams if part else [LIFELINE]
        if total > num_bytes:
            problem = f"it printed more than {num_bytes} bytes"
        elif time.monotonic() > deadline:
            problem = f"it took more than {seconds:g} s"
        elif is_over:
            drained = min(drained, time.monotonic() + DRAIN_SECONDS)
            if output not in ready or output not in streams or time.monotonic() > drained:
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


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the status to exit with."""
    seconds, num_bytes, names, *command = arguments
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this system has no child subreapers")
    variables = {name: os.environ[name] for name in names.split(",") if name in os.environ}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    status = 1
    try:
        with open("prompt.txt", "rb") as prompt:
            process = subprocess.Popen(
                command, stdin=prompt, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables
            )
        problem = watch(process, float(seconds), int(num_bytes))
        if problem:
            sys.stderr.write(f"\nthe program was ended: {problem}\n")
        elif process.returncode is not None:
            status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    except OSError as problem:
        sys.stderr.write(f"{command[0]} cannot be started: {problem}\n")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_all()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
