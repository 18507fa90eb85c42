"""GPU slots: leases that their holders renew, with a real server that restarts and holders that are killed."""

import signal
import subprocess
import sys
from unittest.mock import Mock

import httpx
import pytest

from flows.orchestration import gpu_slots
from flows.orchestration.gpu_slots import LEASE_SECONDS, LOOK_SECONDS, variable_name
from tests.fixtures.faults import happened
from tests.fixtures.serving import Serving
from tests.fixtures.waiting import until

HOLD = """
import sys
from flows.orchestration import gpu_slots
gpu_slots.LEASE_SECONDS, gpu_slots.RENEW_SECONDS, gpu_slots.LOOK_SECONDS = 6.0, 1.0, 0.5
with gpu_slots.gpu_slot(sys.argv[1], lambda line: print(sys.argv[1], line, flush=True)):
    print(sys.argv[1], "holds", flush=True)
    sys.stdin.readline()
print(sys.argv[1], "returned", flush=True)
"""
SLOTS = """
from prefect.variables import Variable
Variable.set("stagecoach-gpu", {"slots": 1}, overwrite=True)
"""


def test_the_name_of_a_pool_is_made_one_of_a_variable():
    assert (variable_name("stagecoach-gpu"), variable_name("A100_east-gpu")) == ("stagecoach-gpu", "a100-east-gpu")


def test_a_lease_begins_anew_when_the_server_answers_again(monkeypatch):
    most = round(LEASE_SECONDS / LOOK_SECONDS)
    looks = []

    def try_slots(limit, run, renewals):
        if len(looks) == most:
            looks.append(None)
            raise httpx.ConnectError("the server is away")
        looks.append(renewals["slot"].look("unchanged"))
        return ("", ["holder"]) if looks[-1] else ("mine", [])

    for name, value in {"_try_slots": try_slots, "current_flow_run": Mock(), "time": Mock()}.items():
        monkeypatch.setattr(gpu_slots, name, value)
    monkeypatch.setattr(gpu_slots, "cancellation", Mock(return_value=""))
    assert gpu_slots._wait_for_slot("limit", "waiter", Mock()) == "mine"
    assert looks == [True] * most + [None] + [True] * most + [False]


@pytest.fixture
def served(tmp_path):
    server = Serving(tmp_path)
    try:
        server.server()
        yield server
    finally:
        server.close()


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.fault(
    "process",
    "Prefect's server restarts while a run holds the GPU slot, and then that run is killed",
    "the slot stays the run's while it lives, and is free a minute after its last renewal",
)
def test_a_slot_outlives_a_restart_of_the_server_and_not_its_holder(served):
    assert subprocess.run([sys.executable, "-c", SLOTS], env=served.environment, timeout=120).returncode == 0
    lines, processes = served.place / "lines", {}

    def hold(run):
        with lines.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", HOLD, run],
                stdin=subprocess.PIPE,
                stdout=out,
                env=served.environment,
                start_new_session=True,  # it is ended by its group
            )
        served.processes.append(process)
        processes[run] = process

    def said(line):
        return lines.exists() and line in lines.read_text().splitlines()

    def wait(line):
        until(lambda: said(line), lambda: f"{lines.read_text()}\n{served.log()}")

    hold("first")
    wait("first holds")
    hold("second")
    wait("second waiting for a slot of stagecoach-gpu, held by first")
    served.restart_server()
    hold("third")
    wait("third waiting for a slot of stagecoach-gpu, held by first")
    assert not said("second holds") and not any("lost" in line for line in lines.read_text().splitlines())
    processes["first"].kill()
    happened(f"SIGTERM to the server, SIGKILL to process {processes['first'].pid}")
    until(lambda: said("second holds") or said("third holds"), lambda: f"{lines.read_text()}\n{served.log()}")
    holder, waiter = ("second", "third") if said("second holds") else ("third", "second")
    wait(f"{waiter} waiting for a slot of stagecoach-gpu, held by {holder}")
    assert not said(f"{waiter} holds")
    processes[holder].communicate(b"\n")
    wait(f"{holder} returned")
    wait(f"{waiter} holds")
    processes[waiter].send_signal(signal.SIGKILL)
