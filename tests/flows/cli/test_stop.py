"""`stagecoach stop` ends every process of a run, or names those that it leaves."""

import os
import socket
import subprocess
import sys

import pytest

from flows.cli.arguments import UsageError
from flows.cli.runs import stop
from flows.services.ownership import live_processes
from storage.store import open_store
from tests.fixtures.driving import ROOT
from tests.fixtures.faults import happened
from tests.fixtures.waiting import until

pytestmark = pytest.mark.engine
WORKER = """
import signal, sys
from flows.services.ownership import recorded_identity
from storage.store import open_store
runs = open_store(sys.argv[1]).runs
runs.record(run="a", event=sys.argv[2], kind="train", config={"steps": 2}, process=recorded_identity())
signal.sigwait([signal.SIGTERM])
runs.record(run="a", event="interrupted", message="ended by SIGTERM")
"""


@pytest.fixture
def workers(tmp_path):
    """Two processes at work on one run, called as the program is; the second has begun last."""
    program = tmp_path / "stagecoach"
    program.write_text("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n" + WORKER)
    started = []
    try:
        for event in ("started", "resumed"):
            command = [sys.executable, "-P", str(program), str(tmp_path / "store"), event]
            started.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}))
            until(lambda: len(live_processes(events(tmp_path))) == len(started), lambda: "a process recorded no start")
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def events(directory):
    runs = open_store(directory / "store").runs
    return runs.events("a") if runs.last("a") else []


@pytest.mark.fault("two writers", "a run that two processes work on is stopped", "both end")
def test_all_processes_of_a_run_end(workers, tmp_path):
    assert stop("a", store=str(tmp_path / "store")) == 0
    happened(f"stopped {[process.pid for process in workers]}")
    assert [process.wait(10) for process in workers] == [0, 0]
    assert live_processes(events(tmp_path)) == []


def test_the_first_process_is_ended_though_the_second_has_ended_before(workers, tmp_path):
    workers[1].terminate()
    assert workers[1].wait(10) == 0
    assert stop("a", store=str(tmp_path / "store")) == 0
    assert workers[0].wait(10) == 0


def test_processes_that_are_left_are_named(tmp_path, capsys):
    store = open_store(tmp_path / "store")
    store.runs.record(run="a", event="started", kind="train", config={"steps": 2}, host="elsewhere", pid=7)
    with pytest.raises(UsageError, match="no process to end here: process 7 on elsewhere"):
        stop("a", store=str(tmp_path / "store"))
    store.runs.record(run="a", event="finished", host="elsewhere", pid=7)
    with pytest.raises(UsageError, match="no process to end here: finished"):
        stop("a", store=str(tmp_path / "store"))
    store.runs.record(run="a", event="started", host=socket.gethostname(), pid=os.getppid())
    with pytest.raises(UsageError, match=f"no process to end here: process {os.getppid()} on"):
        stop("a", store=str(tmp_path / "store"))
