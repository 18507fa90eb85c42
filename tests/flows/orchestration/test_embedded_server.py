"""The embedded Prefect server: real, with its UI, whole records, and gone whatever happens to the flow."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from flows.services.ownership import owned_processes, sweep
from storage.store import open_store
from tests.fixtures.faults import happened
from tests.fixtures.programs import PROGRAMS, ask, environment, said_by
from tests.fixtures.small_disks import mounted
from tests.fixtures.waiting import PATIENCE, until

pytestmark = pytest.mark.engine
PROGRAM = PROGRAMS / "embedded.py"


class Process:
    """The test process with its embedded API, up to a given line of what it says."""

    def __init__(self, home, ending):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(home), ending],
            env=environment(),
            cwd=home.parent,
            stdout=subprocess.PIPE,
            stderr=(home.parent / "stderr").open("ab"),
            text=True,
            start_new_session=True,
        )
        self.said = {}

    def until(self, name):
        """Read what the process says until it says `name`."""
        while name not in self.said:
            line = self.process.stdout.readline()
            assert line, f"the process ended before it said {name}"
            self.said |= json.loads(line)
        return self.said[name]

    def end(self):
        """Wait for the end; then no process may be left."""
        for line in self.process.stdout:
            self.said |= json.loads(line)
        return self.process.wait(PATIENCE)

    def left(self):
        return owned_processes(self.said["owner"])

    def gone(self):
        """Wait until the guardians have ended the last process of this one."""
        until(lambda: not self.left(), lambda: f"left: {self.left()}")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """One state directory for all tests, so that the database is made once."""
    yield tmp_path_factory.mktemp("prefect") / "state"
    sweep()


def task_runs(url, flow_run):
    """Names of the task runs that are recorded of a flow run by now."""
    return {task["name"] for task in ask(url, "/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})}


def states(home):
    """State of every flow run, asked of a new server on the same state directory."""
    process = Process(home, "wait")
    process.until("published")
    found = {run["id"]: run["state_type"] for run in ask(process.said["url"], "/flow_runs/filter", {})}
    os.kill(process.process.pid, signal.SIGKILL)
    process.end()
    process.gone()
    return found


def test_a_flow_is_recorded_whole_and_the_ui_works_and_nothing_stays(home):
    process = Process(home, "wait")
    run = process.until("flow_run")
    assert process.until("published") == [True, True]
    url = process.said["url"]
    assert process.said["embedded"]
    assert process.said["cancelled"] is False
    assert ask(url.removesuffix("/api"), "/ui-settings")["api_url"] == url
    assert b"<html" in ask(url.removesuffix("/api"), "/")
    wanted = {"rollout-0", "rollout-1", "rollout-2"}
    until(lambda: task_runs(url, run) >= wanted, lambda: f"{task_runs(url, run)}")  # recorded a little later
    assert task_runs(url, run) == wanted
    artifacts = {artifact["key"]: artifact for artifact in ask(url, "/artifacts/latest/filter", {})}
    assert {"run-demo-1", "progress-demo-1"} <= artifacts.keys()
    assert artifacts["run-demo-1"]["data"].count("\n```\nreward ") == 1
    assert artifacts["progress-demo-1"]["data"] == 100.0
    # Published twice: renewed, and not kept as two versions.
    kept = ask(url, "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run]}}})
    assert sorted(artifact["key"] for artifact in kept) == ["progress-demo-1", "run-demo-1"]
    ask(url, f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}, "force": True})
    process.process.send_signal(signal.SIGTERM)
    assert process.end() != 0
    assert process.left() == []
    assert sorted(path.name for path in home.glob("server-*")) == [f"server-{process.process.pid}.log"]


@pytest.mark.nightly
def test_a_finished_flow_ends_in_order(home):
    process = Process(home, "none")
    assert process.end() == 0
    assert process.left() == []  # at once: the process waits for its server
    assert "Finished in state Completed()" in (home.parent / "flow.log").read_text()
    assert "Finished in state Completed()" not in (home.parent / "stderr").read_text()  # nothing tears a panel apart
    assert states(home)[process.said["flow_run"]] == "COMPLETED"


@pytest.mark.fault("signal", "SIGTERM and Ctrl-C reach a flow", "Prefect's state is Crashed, no process left")
@pytest.mark.nightly
def test_sigterm_and_ctrl_c_are_reported_as_crashes(home):
    flow_runs = []
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)):
        process = Process(home, "wait")
        process.until("published")
        os.killpg(process.process.pid, number)
        assert process.end() == status
        happened(f"status {status}")
        assert process.left() == []
        flow_runs.append(process.said["flow_run"])
    found = states(home)
    assert {found[run] for run in flow_runs} == {"CRASHED"}


@pytest.mark.nightly
@pytest.mark.fault("process", "a flow with an embedded server is killed", "no process left, its state is swept")
def test_a_killed_flow_leaves_no_process_and_its_run_is_swept_at_the_next_start(home):
    process = Process(home, "crash")
    assert process.end() == -signal.SIGKILL
    happened("status -9")
    process.gone()
    assert states(home)[process.said["flow_run"]] == "CRASHED"


@pytest.mark.fault("services", "the embedded Prefect server is killed", "it comes back at its address, no state lost")
def test_a_killed_server_comes_back_at_the_same_address_and_nothing_is_lost(home):
    process = Process(home, "server")
    assert process.end() == 0
    assert process.said["ended"]
    happened("SIGKILL to the server")
    assert process.left() == []
    assert states(home)[process.said["flow_run"]] == "COMPLETED"


def recorded(home):
    """States of the flow runs, and of the task runs, that a database holds."""
    with closing(sqlite3.connect(Path(home, "prefect.db"))) as database:
        states = [database.execute(f"SELECT state_type FROM {name}").fetchall() for name in ("flow_run", "task_run")]
    flows, tasks = ([state for (state,) in found] for found in states)
    return flows, tasks


SILENT = "Prefect does not answer: the run goes on, and its pages there are late"


@pytest.mark.nightly
@pytest.mark.fault(
    "services",
    "the Prefect server is stopped while a run is at work",
    "steps go on, one line, all states later",
)
def test_a_server_that_hangs_stops_no_run_and_hears_of_all_of_it_later(tmp_path):
    said = hanging(tmp_path)
    assert not said["freed"], "the run waited for the server"
    happened(said["notes"][0])
    assert said["steps_while_stopped"] == [0, 1, 2, 3, 4] and said["num_steps"] == 6
    silent, again = said["notes"]
    assert silent == SILENT and again.startswith("Prefect answers again, after ")
    num_tasks = len(open_store(tmp_path / "store").ledger.entries(run="run"))
    assert recorded(said["home"]) == (["COMPLETED"], ["COMPLETED"] * num_tasks)


@pytest.mark.fault("services", "the Prefect server is stopped for good", "it is started again, the run ends in order")
@pytest.mark.nightly
def test_a_server_that_hangs_for_good_is_started_again_and_the_run_ends_in_order(tmp_path):
    said = hanging(tmp_path, "last")
    assert not said["freed"] and said["num_steps"] == 6
    # On a busy machine its start alone is worth a note before.
    assert SILENT in said["notes"]
    happened(SILENT)
    restarted = "prefect: did not answer any more and was ended; restart 1 of 5"
    assert any(note.startswith(restarted) for note in said["notes"])
    assert recorded(said["home"])[0] == ["COMPLETED"]


def hanging(place, *ending):
    """Return what a run says whose Prefect server hangs, or whose disk fills up, as `ending` has it."""
    return said_by("-m", "tests.fixtures.programs.hanging", str(place), *ending)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system with room for a small run and Prefect's database."""
    yield from mounted(tmp_path / "disk", "24m")


@pytest.mark.nightly
@pytest.mark.fault("disk", "the disk of store and Prefect database fills up", "one message; with space the run goes on")
def test_a_disk_that_is_full_under_store_and_prefect_is_one_message_and_the_run_goes_on_later(small_disk):
    said = hanging(small_disk, "full")
    assert said["error"].startswith("NoSpace: ") and "500 Internal" not in said["error"]
    assert f"Where: {small_disk}/store" in said["error"] and "free some space" in said["error"]
    assert said["steps"] == [0, 1]
    happened(said["error"])

    def keys():
        return {entry.key for entry in open_store(small_disk / "store").ledger.entries(run="run")}

    kept = keys()
    (small_disk / "filler").unlink()
    again = hanging(small_disk, "none")
    assert again["num_steps"] == 6
    assert kept < keys()
