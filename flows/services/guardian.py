"""A small process that stands between a flow and one of its services, and leaves nothing of the service behind.

It is started as `python -I -S guardian.py GRACE PROGRAM [ARGUMENT ...]` and uses the standard library only, so
that it is up in some 20 ms. Its input is a pipe whose write end only the flow holds: its end of file means
"stop", whether the flow asked or died by any signal. A parent-death signal on the guardian would not do: it fires
when the flow's spawning thread ends, not the flow.

The guardian is a child subreaper, so that orphans of the service come to it however often they fork; it is done when
the kernel says that it has no child left. It exits with the service's status, 128 plus the number after a signal.
Linux only.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Sequence

LIFELINE = 0
"""The descriptor of its input."""
SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
LOOK_SECONDS = 0.05
"""Between two looks at the lifeline."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Orphans have lost whom they worked for: there is little they could still bring to an end.
ORPHAN_GRACE_SECONDS = 2.0
# A process that forks all the time may escape one round of kills, not many.
KILL_AGAIN_SECONDS = 0.2


def prctl(option: int, value: int) -> None:
    """Set one attribute of the calling process; raise OSError when the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def descendants(ancestor: int) -> list[int]:
    """Return all living processes under `ancestor`, nearest first, out of /proc."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # After the last bracket: a process may have brackets and blanks in its name.
                    parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # gone since it was listed
    line = [ancestor]
    for process in line:  # grows while it is walked
        line += [child for child, parent in parents.items() if parent == process]
    return line[1:]


def send(number: int, processes: Sequence[int]) -> None:
    """Send a signal to every process that is still there."""
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def spawn(arguments: Sequence[str]) -> int:
    """Start the service in a session of its own that dies with its guardian; return its process id once it runs."""
    guardian = os.getpid()
    running_read, running_write = os.pipe()
    process = os.fork()
    if process:
        os.close(running_write)
        os.read(running_read, 1)  # ends with exec: from here on the service's process group can be signalled
        os.close(running_read)
        return process
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), LIFELINE)  # the service must not hold what its guardian waits for
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(128 + signal.SIGKILL)  # the guardian died before the line above
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.execvp(arguments[0], list(arguments))
    except OSError as problem:
        os.write(2, f"cannot start {arguments[0]!r}: {problem}\n".encode())
    os._exit(127)


class Guardian:
    """Runs one service to its end, and then until none of its processes is left."""

    def __init__(self, grace: float, arguments: Sequence[str]) -> None:
        self.grace = grace
        self.status: int | None = None  # of the service itself, once it has ended
        self.asked = False  # whether the service was asked to end
        self.deadline: float | None = None  # when patience ends
        self.service = spawn(arguments)

    def ask(self) -> None:
        """Ask the service's process group to end, once."""
        if self.asked:
            return
        self.asked = True
        self.deadline = time.monotonic() + self.grace
        try:
            os.killpg(self.service, signal.SIGTERM)
        except ProcessLookupError:
            return  # it has ended by itself

    def reap(self) -> bool:
        """Collect dead children, orphans included; return whether any child is left."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if process == 0:
                return True
            if process == self.service:
                self.status = os.waitstatus_to_exitcode(status)
                self._see_to_orphans()

    def _see_to_orphans(self) -> None:
        """The service is gone: what is left of it has a short while to follow."""
        self.asked = True
        orphan_deadline = time.monotonic() + min(self.grace, ORPHAN_GRACE_SECONDS)
        self.deadline = min(self.deadline or orphan_deadline, orphan_deadline)
        send(signal.SIGTERM, descendants(os.getpid()))

    def wait(self) -> None:
        """Sleep until a child ends, a signal or the end of the lifeline comes, or patience ends."""
        patience = LOOK_SECONDS if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        came = signal.sigtimedwait(SIGNALS, min(LOOK_SECONDS, patience))
        # Nothing is ever written to the lifeline: what can be read is its end.
        if (came and came.si_signo == signal.SIGTERM) or select.select([LIFELINE], [], [], 0)[0]:
            self.ask()

    def run(self) -> int:
        """Guard until no process of the service is left; return the status to exit with."""
        while self.reap():
            if self.deadline is not None and time.monotonic() >= self.deadline:
                send(signal.SIGKILL, descendants(os.getpid()))
                self.deadline = time.monotonic() + KILL_AGAIN_SECONDS  # for those that forked meanwhile
            self.wait()
        assert self.status is not None, "a service cannot be collected before it was started"
        return self.status if self.status >= 0 else 128 - self.status


def main(arguments: Sequence[str]) -> int:
    """Read the command line, guard the service, return the status to exit with."""
    # Before the service is there, whose end must not be missed; waited for in `wait` alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the flow decides what it means
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # It may fork at once, and its orphans must come here.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    return Guardian(float(arguments[0]), arguments[1:]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
