"""Whatever ends a flow, no process of its services is left."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from flows.services import guardian
from flows.services.ownership import (
    is_alive,
    owned_processes,
    start_time,
    sweep,
)
from tests.fixtures.faults import happened
from tests.fixtures.programs import PROGRAMS, ROOT
from tests.fixtures.waiting import PATIENCE, until

pytestmark = pytest.mark.engine


class Flow:
    """The test flow in a process group of its own, started and ready."""

    def __init__(self, directory, ending):
        self.directory = directory
        command = [sys.executable, str(PROGRAMS / "flow.py"), str(directory), ending]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # Whoever runs the tests with nohup has a hangup ignored, and so would the flow.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        self.owner = f"{self.process.pid}:{start_time(self.process.pid)}"
        assert self.process.stdout.readline() == b"ready\n"

    def orphan(self):
        """Process id of the double-forked grandchild of the stubborn service."""
        return int((self.directory / "stubborn.json.orphan").read_text())


@pytest.fixture
def start(tmp_path):
    flows = []

    def begin(ending):
        flows.append(Flow(tmp_path, ending))
        return flows[-1]

    yield begin
    for flow in flows:
        flow.process.kill()
        flow.process.wait()
        flow.process.stdout.close()
    sweep()


@pytest.mark.fault("process", "a flow's process group gets a signal", "no process of its services is left")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.essential
def test_a_killed_flow_leaves_nothing(start, number):
    flow = start("wait")
    before = owned_processes(flow.owner)
    assert flow.orphan() in before
    assert len(before) == 5  # two guardians, two services, the orphan
    os.killpg(flow.process.pid, number)  # the group, as a terminal does it
    happened(f"status {flow.process.wait(PATIENCE)}")
    until(lambda: owned_processes(flow.owner) == [], lambda: f"left: {owned_processes(flow.owner)}")
    until(lambda: not any(map(start_time, before)), lambda: f"one of {before} lives")  # the last dies a moment later


@pytest.mark.parametrize(("ending", "status"), [("return", 0), ("raise", 1)])
def test_the_end_of_the_block_leaves_nothing(start, ending, status):
    flow = start(ending)
    assert flow.process.wait(PATIENCE) == status
    assert owned_processes(flow.owner) == []  # at once: the block waits
    assert (flow.directory / "polite.json.ended").exists()  # and was polite


@pytest.mark.fault(
    "process", "a guardian is killed while its flow is stopped", "the service ends with it, the sweep finds the orphan"
)
def test_a_killed_guardian_takes_the_service_along_and_the_sweep_finds_the_rest(start):
    flow = start("wait")
    service = int((flow.directory / "stubborn.json").read_text().split()[-1].rstrip("}"))
    keeper = psutil.Process(service).ppid()
    flow.process.send_signal(signal.SIGSTOP)  # so that the flow itself cannot clean up
    os.waitid(os.P_PID, flow.process.pid, os.WSTOPPED)  # told when the last of its threads stands, not before
    os.kill(keeper, signal.SIGKILL)
    happened(f"SIGKILL to {keeper}")
    until(lambda: start_time(service) is None, lambda: "the service lives on without its guardian")
    assert flow.orphan() in owned_processes(flow.owner)
    flow.process.kill()
    flow.process.wait()
    sweep()  # unless another flow of this machine has begun at this moment, and swept first
    assert start_time(flow.orphan()) is None
    assert owned_processes(flow.owner) == []


def test_sweep_spares_what_has_a_living_owner(start):
    flow = start("wait")
    sweep()
    assert len(owned_processes(flow.owner)) == 5


@contextmanager
def guarded(seconds, *program):
    """Give the process of a guardian, whose lifeline is held within the block."""
    command = [sys.executable, "-I", "-S", guardian.__file__, str(seconds), *program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("program", "status"),
    [(("sh", "-c", "exit 7"), 7), (("sh", "-c", "kill -9 $$"), 137), (("/no/such/program",), 127)],
)
def test_guardian_exits_with_the_status_of_its_service(program, status):
    with guarded(0.5, *program) as process:
        assert process.wait(PATIENCE) == status


def test_an_identity_is_of_one_process_only():
    process = subprocess.Popen(["sleep", "60"])
    name = f"{process.pid}:{start_time(process.pid)}"
    assert is_alive(name)
    assert not is_alive(f"{process.pid}:1")  # another process that had the same number
    process.kill()
    until(lambda: not is_alive(name), lambda: "a zombie is not alive")
    process.wait()
    assert not is_alive(name)
    assert not is_alive("")
