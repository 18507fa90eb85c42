"""A real run whose engine, environment server, learner and flow are killed in the middle of steps: it comes to its end.

Two processes share the work: the first loses its engine in the middle of a rollout and is killed itself in the middle
of the next; the second loses its environment server in what is left of that rollout, and its learner while it trains.
"""

import os
import socket
import time
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from flows.services.ownership import owned_processes
from tests.acceptance.lives import LivedRun, stagecoach
from tests.fixtures.driving import check_once, committed_groups, finished, rows, weights
from tests.fixtures.faults import happened

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

STEPS, GROUPS, MEMBERS = 3, 6, 4
PART = "after commit rollout {} part"
FIRST = {PART.format(0): "engine", PART.format(1): "flow"}
SECOND = {PART.format(1): "environment", "after request train": "learner"}


class Survived(NamedTuple):
    """The run that was killed so often, and what was there in between."""

    run: LivedRun
    safe: set[str]
    """Groups that were committed when the flow was killed."""
    parts: list[str]
    """Parts that the ledger named when the flow was killed."""
    left_alive: list[int]
    """Processes of ours after the last process had ended in order."""


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    """The run, in its two processes."""
    with LivedRun(tmp_path_factory.mktemp("survived")) as run:
        run.live(FIRST, -9)
        safe, parts = committed_groups(run.store), [entry.part for entry in run.store.ledger.entries() if entry.part]
        run.live(SECOND)
        left = [process for owner in run.lines("owners") for process in owned_processes(owner)]
        yield Survived(run, safe, parts, left)


def test_every_kill_happened_and_was_in_the_middle(survived):
    receipts = survived.run.receipts
    assert [receipt["moment"] for receipt in receipts] == [*FIRST, *SECOND]
    first, second = (receipt["pid"] for receipt in receipts[1:3])
    assert first != second
    everything = {f"{step}-{slot}" for step in range(2) for slot in range(GROUPS)}
    assert {group for group in everything if group.startswith("0-")} < survived.safe < everything
    generations = survived.run.outcome["generations"]
    assert generations["environment"] == generations["learner"] == 2
    assert generations["engine"] == 1, "only what was killed was started again"


def test_every_service_that_was_killed_is_an_event_of_the_run_and_the_flow_itself_is_not(survived):
    losses = [loss.message for loss in survived.run.store.runs.lost_services("run")]
    told = [f"{message.split(';')[0]}; {message.split('; ')[1].split()[0]}" for message in losses]
    expected = ("engine", "environment reverse_text", "learner")
    assert told == [f"{service}: was killed by signal 9; restart" for service in expected]


@pytest.mark.fault(
    "services",
    "engine, flow, environment server and learner are killed in one run",
    "every rollout once, nothing of a service put down to a rollout",
)
def test_the_run_ended_with_every_rollout_once(survived):
    happened(", ".join(receipt["moment"] for receipt in survived.run.receipts))
    store = survived.run.store
    assert [step["step"] for step in survived.run.outcome["steps"]] == list(range(STEPS))
    found = rows(store)
    assert len(found["traces"]) == len({row["assignment_id"] for row in found["traces"]}) == STEPS * GROUPS * MEMBERS
    lost = [row for row in found["traces"] if row["error_class"] is not None]
    assert lost == [], "the loss of a service was put down to a rollout"
    assert [version for version, _ in weights(store)] == list(range(STEPS + 1))
    assert len(finished(store)) == 2 + 7 * STEPS
    check_once(survived.run.root)


def test_committed_groups_were_not_sampled_again(survived):
    store = survived.run.store
    parts = [entry for entry in store.ledger.entries(stage="rollout") if entry.part]
    assert set(survived.parts) < {entry.part for entry in parts}
    groups = [
        group
        for entry in parts
        for group in set(store.read(entry.slices("traces"), ["group_id"])["group_id"].to_pylist())
    ]
    assert sorted(groups) == sorted(f"{step}-{slot}" for step in range(STEPS) for slot in range(GROUPS))


def test_no_process_port_or_temporary_file_is_left(survived):
    assert len({*survived.run.lines("owners")}) == 2
    assert survived.left_alive == []
    reports, temporary = survived.run.outcome["reports"], survived.run.temporary
    addresses = {name: report.get("url") or report.get("address") for name, report in reports.items()}
    assert set(addresses) == {"engine", "environment", "learner", "prefect"} and all(addresses.values())
    assert [name for name, address in addresses.items() if answers(address)] == []
    room = temporary / f"stagecoach-{os.getuid()}"  # of all flows of this user, empty when none runs
    assert [path for path in temporary.rglob("*") if path != room] == []
    assert list((survived.run.root / "policies" / ".scratch").iterdir()) == []


def answers(address):
    """Tell whether somebody accepts connections at an address."""
    parts = urlsplit(address if "://" in address else f"tcp://{address}")
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex((parts.hostname, parts.port)) == 0


def test_the_same_again_computes_nothing_and_says_so(survived):
    root, started = survived.run.root, time.time()
    assert "; 0 computed, " in stagecoach("resume", "run", "--store", str(root))
    touched = [path.name for path in (root / "logs").rglob("*.json") if path.stat().st_mtime > started]
    assert touched == [], "a service was started"
