"""A small process that stands between a flow and one of its services, and leaves nothing of the service behind.

It is started as `python -I -S guardian.py LIFELINE GRACE PROGRAM [ARGUMENT ...]` and uses the standard library only, so
that it is up in some 20 ms. LIFELINE is the read end of a pipe whose write end only the flow holds: its end of file
means "stop", whether the flow asked or died by any signal. A parent-death signal on the guardian would not do: it fires
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


def parents() -> dict[int, int]:
    """Return the parent of every process that there is, out of /proc."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # After the last bracket: a process may have brackets and blanks in its name.
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # gone since it was listed
    return found


def descendants(ancestor: int) -> list[int]:
    """Return all living processes under `ancestor`, nearest first."""
    line, parent_of = [ancestor], parents()
    for process in line:  # grows while it is walked
        line += [child for child, parent in parent_of.items() if parent == process]
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
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(128 + signal.SIGKILL)  # the guardian died before the line above
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(arguments[0], list(arguments))
    except OSError as problem:
        os.write(2, f"cannot start {arguments[0]!r}: {problem}\n".encode())
    os._exit(127)


class Guardian:
    """Runs one service to its end, and then until none of its processes is left."""

    def __init__(self, lifeline: int, grace: float, arguments: Sequence[str]) -> None:
        self.grace = grace
        self.status: int | None = None  # of the service itself, once it has ended
        self.asked = False  # whether the service was asked to end
        self.terminated = False  # whether this process was asked to end
        self.deadline: float | None = None  # when patience ends
        wake_read, wake_write = os.pipe()
        # A signal handler must never wait on a full pipe.
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        self.wake = wake_read
        self.lifeline = lifeline
        self.poll = select.poll()
        self.poll.register(lifeline, select.POLLIN | select.POLLHUP)
        self.poll.register(wake_read, select.POLLIN)
        self._listen(wake_write)
        self.service = spawn(arguments)

    def _listen(self, wake_write: int) -> None:
        """Turn signals into bytes on a pipe, so that one poll waits for everything."""
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the flow decides what it means
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _terminate(self, *_: object) -> None:
        self.terminated = True  # acted on in `wait`: the signal may come before the service is there

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
        timeout = None if self.deadline is None else max(0.0, self.deadline - time.monotonic()) * 1000
        for descriptor, _ in self.poll.poll(timeout):
            if descriptor == self.wake:
                os.read(self.wake, 4096)
                if self.terminated:
                    self.ask()
            elif not os.read(self.lifeline, 4096):
                self.poll.unregister(self.lifeline)
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
    lifeline, grace = int(arguments[0]), float(arguments[1])
    # The service must not hold what tells its guardian that the flow is gone.
    os.set_inheritable(lifeline, False)
    # Before the service is there: it may fork at once, and its orphans must come here.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    return Guardian(lifeline, grace, arguments[2:]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
