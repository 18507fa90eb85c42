"""A real run whose engine, environment server, learner and flow are killed in the middle of steps: it comes to its end.

Two processes share the work: the first loses its engine in the middle of a rollout and is killed itself in the middle
of the next; the second loses its environment server in what is left of that rollout, and its learner while it trains.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from flows.services.ownership import owned_processes
from storage.store import open_store
from tasks.learner.tiny import tiny_qwen3
from tests.acceptance.lives import lines, live
from tests.fixtures.driving import ROOT, check_once, committed_groups, finished, rows, weights
from tests.fixtures.faults import happened

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

STEPS, GROUPS, MEMBERS = 3, 6, 4
PART = "after commit rollout {} part"
FIRST = {PART.format(0): "engine", PART.format(1): "flow"}
SECOND = {PART.format(1): "environment", "after request train": "learner"}


@dataclass(frozen=True)
class Survived:
    """What the run that was killed so often left behind."""

    directory: Path
    temporary: Path
    owners: tuple[str, ...]
    left_alive: tuple[int, ...]
    """Processes of ours after the last process had ended in order."""
    safe: frozenset[str]
    """Groups that were committed when the flow was killed."""
    parts: tuple[str, ...]
    """Parts that the ledger named when the flow was killed."""
    receipts: tuple[dict[str, Any], ...]
    outcome: dict[str, Any]

    @property
    def store(self) -> Path:
        """The root of the run's store."""
        return self.directory / "store"


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    """The run, in its two processes, with a directory for temporary files of its own."""
    directory = tmp_path_factory.mktemp("survived")
    temporary = Path(tempfile.mkdtemp(prefix="sc-"))  # short: sockets are put below it
    model = tiny_qwen3(directory / "model", seed=3)
    try:
        status, log = live(directory, temporary, model, FIRST)
        assert status == -9, log
        store = open_store(directory / "store")
        safe, parts = committed_groups(store), [entry.part for entry in store.ledger.entries() if entry.part]
        status, log = live(directory, temporary, model, SECOND)
        owners = tuple(lines(directory / "owners.jsonl"))
        left = tuple(process for owner in owners for process in owned_processes(owner))
        assert status == 0, log
        receipts, outcome = lines(directory / "receipt.jsonl"), json.loads((directory / "outcome.json").read_text())
        yield Survived(directory, temporary, owners, left, frozenset(safe), tuple(parts), tuple(receipts), outcome)
    finally:
        shutil.rmtree(temporary)


def test_every_kill_happened_and_was_in_the_middle(survived):
    assert [receipt["moment"] for receipt in survived.receipts] == [*FIRST, *SECOND]
    first, second = (receipt["pid"] for receipt in survived.receipts[1:3])
    assert first != second
    everything = {f"{step}-{slot}" for step in range(2) for slot in range(GROUPS)}
    assert {group for group in everything if group.startswith("0-")} < survived.safe < everything
    generations = survived.outcome["generations"]
    assert generations["environment"] == generations["learner"] == 2
    assert generations["engine"] == 1, "only what was killed was started again"


def test_every_service_that_was_killed_is_an_event_of_the_run_and_the_flow_itself_is_not(survived):
    losses = [loss.message for loss in open_store(survived.store).runs.lost_services("run")]
    told = [f"{message.split(';')[0]}; {message.split('; ')[1].split()[0]}" for message in losses]
    expected = ("engine", "environment reverse_text", "learner")
    assert told == [f"{service}: was killed by signal 9; restart" for service in expected]


@pytest.mark.fault(
    "services",
    "engine, flow, environment server and learner are killed in one run",
    "every rollout once, nothing of a service put down to a rollout",
)
def test_the_run_ended_with_every_rollout_once(survived):
    happened(", ".join(receipt["moment"] for receipt in survived.receipts))
    store = open_store(survived.store)
    assert [step["step"] for step in survived.outcome["steps"]] == list(range(STEPS))
    found = rows(store)
    assert len(found["traces"]) == len({row["assignment_id"] for row in found["traces"]}) == STEPS * GROUPS * MEMBERS
    lost = [row for row in found["traces"] if row["error_class"] is not None]
    assert lost == [], "the loss of a service was put down to a rollout"
    assert [version for version, _ in weights(store)] == list(range(STEPS + 1))
    assert len(finished(store)) == 2 + 7 * STEPS
    check_once(survived.store)


def test_committed_groups_were_not_sampled_again(survived):
    store = open_store(survived.store)
    parts = [entry for entry in store.ledger.entries(stage="rollout") if entry.part]
    assert set(survived.parts) < {entry.part for entry in parts}
    groups = [
        group
        for entry in parts
        for group in set(store.read(entry.slices("traces"), ["group_id"])["group_id"].to_pylist())
    ]
    assert sorted(groups) == sorted(f"{step}-{slot}" for step in range(STEPS) for slot in range(GROUPS))


def test_no_process_port_or_temporary_file_is_left(survived):
    assert len(set(survived.owners)) == 2
    assert survived.left_alive == ()
    reports = survived.outcome["reports"]
    addresses = {name: report.get("url") or report.get("address") for name, report in reports.items()}
    assert set(addresses) == {"engine", "environment", "learner", "prefect"} and all(addresses.values())
    assert [name for name, address in addresses.items() if answers(address)] == []
    room = survived.temporary / f"stagecoach-{os.getuid()}"  # of all flows of this user, empty when none runs
    assert [path for path in survived.temporary.rglob("*") if path != room] == []
    assert list((survived.store / "policies" / ".scratch").iterdir()) == []


def answers(address: str) -> bool:
    """Tell whether somebody accepts connections at an address."""
    parts = urlsplit(address if "://" in address else f"tcp://{address}")
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex((parts.hostname, parts.port)) == 0


def test_the_same_again_computes_nothing_and_says_so(survived):
    command = [sys.executable, "-P", "-m", "flows.cli", "resume", "run", "--store", str(survived.store)]
    started = time.time()
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "; 0 computed, " in done.stdout + done.stderr
    touched = [path.name for path in (survived.store / "logs").rglob("*.json") if path.stat().st_mtime > started]
    assert touched == [], "a service was started"
