"""Processes that start at once: forked from one that has imported torch, Arrow and the program, and used none of it.

Importing is most of the life of a small process, and nothing of it can be lost. What is forked here is a process of its
own all the same, a child of whoever asked for it, and does what `python -m MODULE` does. A flow has a server of its own
for its services: guardians and learners are forked where otherwise they would be executed. What differs: they do not
carry marks in /proc, by which a later flow finds the services of a guardian that was killed.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from flows.services import process as service_process
from flows.services.guardian import PR_SET_CHILD_SUBREAPER, prctl
from tasks.runtime.process_variables import module_command
from tests.fixtures.driving import ROOT

FLOW = "tests.fixtures.dying_run"
REQUEST_BYTES = 2**17
FIRST_DESCRIPTOR = 3
IMPORTED = (
    "flows.cli",
    FLOW,
    "numpy.ma",
    "pyarrow.acero",
    "renderers",
    "storage.maintenance.repair",
    "storage.maintenance.sweep",
    "flows.exchange.imports",
    "flows.exchange.export",
    "flows.cli.maintenance",
    "flows.runtime.maintenance",
    "tasks.learner.trainer",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What flows, commands and learners import, at first or later."""
AUTOGROUP = Path("/proc/self/autogroup")
LOOK_SECONDS = 0.005


class Forked:
    """A child of this process that a server forked; what is used of subprocess.Popen."""

    def __init__(self, pid):
        self.pid = pid
        self.returncode = None
        self._lock = threading.Lock()

    def poll(self):
        """Return the exit status, minus the signal's number after a signal; None while it runs."""
        with self._lock:
            if self.returncode is None:
                done, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if done else None
            return self.returncode

    def wait(self, timeout=float("inf")):
        """Wait for its end; return the exit status. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(LOOK_SECONDS)
        return status

    def kill(self):
        """Kill it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """The near end of a server, which ends with the process that asks it."""

    def __init__(self, asked):
        self._asked = asked
        self._lock = threading.Lock()
        # What the server's child leaves behind as it ends becomes a child of this process.
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    @classmethod
    def imported(cls):
        """Start a server in a new process, which imports all there is to import."""
        near, far = socket.socketpair()
        command = [sys.executable, "-P", "-m", __spec__.name, str(far.fileno())]
        variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
        subprocess.Popen(command, cwd=ROOT, env=variables, pass_fds=[far.fileno()])
        far.close()
        return cls(near)

    @classmethod
    def forked(cls):
        """Fork a server off this process, which must not have used anything yet."""
        near, far = socket.socketpair()
        if os.fork() == 0:
            near.close()
            serve(far)
        far.close()
        return cls(near)

    def start(self, arguments, variables, log, *passed):
        """Do what `python -m` does with the arguments, in a new session; the output goes to the descriptor `log`.

        An argument `{}` stands for the number that the descriptor in `passed` has in the new process.
        """
        request = {"arguments": list(arguments), "variables": dict(variables)}
        with self._lock:
            socket.send_fds(self._asked, [json.dumps(request).encode()], [log, *passed])
            return Forked(int(self._asked.recv(REQUEST_BYTES)))


def serve(asked):
    """Fork a process for each request, whose parent ends at once; return in that process, as what was asked for."""
    while True:
        data, descriptors, *_ = socket.recv_fds(asked, REQUEST_BYTES, 8)
        if not data:
            os._exit(0)
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == middle:
                time.sleep(LOOK_SECONDS / 10)
            asked.send(str(os.getpid()).encode())
            become(**json.loads(data), descriptors=descriptors)
        os.waitpid(middle, 0)
        for each in descriptors:
            os.close(each)


def become(arguments, variables, descriptors):
    """Be the process that was asked for, with its variables and descriptors, and no others; then end."""
    os.setsid()
    if AUTOGROUP.exists():
        # The kernel shares out time among sessions, and a new one knows nothing of the niceness of the one before.
        AUTOGROUP.write_text(str(os.nice(0)))
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    log, *passed = descriptors
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    close_all(passed)
    run([str(passed[0]) if word == "{}" else word for word in arguments])


def close_all(but=()):
    """Close what a new program would not have: all but the standard streams and what is passed on."""
    for each in map(int, os.listdir("/proc/self/fd")):
        if each >= FIRST_DESCRIPTOR and each not in but:
            with suppress(OSError):
                os.close(each)


def run(arguments):
    """Run a module as the main one; its services, if it starts any, come from a server of its own."""
    module, *sys.argv[1:] = arguments
    if module == FLOW:
        Guarded(ForkServer.forked()).replace()
    os.execvp = execute  # type: ignore[assignment]
    sys.modules.pop(module, None)
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # none may get out, or this process would go on as the server that forked it
        traceback.print_exc()
        status = 1
    # As Python ends, but for taking every imported module apart again, which is as long as the work.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def execute(file, arguments):
    """Stand in for the execution of another Python, which is this one."""
    module = module_of(arguments)
    close_all()
    # As Python sets them when it starts; to the guardian they meant something else.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    run(module)


def module_of(arguments):
    """Return the module that a command of the program runs, with its arguments."""
    *python, _ = module_command("")
    assert list(arguments[: len(python)]) == python, arguments
    return list(arguments[len(python) :])


class Guarded:
    """Starts a flow's services behind guardians, as the flow does, from a server."""

    def __init__(self, server):
        self._server = server

    def replace(self):
        """Take the place of the function of flows that starts a program behind a guardian."""
        service_process.start_guarded = self.start  # type: ignore[assignment]

    def start(self, argv, variables, log, heading, grace_seconds):
        """Start a program; return its guardian and its lifeline."""
        lifeline = service_process.Lifeline()
        with log.open("ab") as output:
            output.write(f"{heading}\n".encode())
            output.flush()
            arguments = ["flows.services.guardian", "{}", str(grace_seconds), *argv]
            guardian = self._server.start(arguments, variables, output.fileno(), lifeline.read)
        os.close(lifeline.read)
        return guardian, lifeline


def main(descriptor):
    """Import what flows, commands and learners import, and serve."""
    for name in IMPORTED:
        importlib.import_module(name)
    serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main(int(sys.argv[1]))
