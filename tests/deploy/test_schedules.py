"""Schedules with a real Prefect server and worker: each firing trains, also after restarts and behind a long one."""

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from storage.store import open_store
from tests.fixtures.faults import happened
from tests.fixtures.serving import Serving, serving
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("served")) as started:
        yield started


def every(served: Serving, seconds: int, **parameters: Any) -> str:
    """Let a clock start runs of supervised training; return the id of its schedule."""
    deployment = served.ask("/deployments/name/sft/sft")
    clock = {"interval": seconds, "anchor_date": (datetime.now(UTC) + timedelta(seconds=5)).isoformat()}
    schedule = {"active": True, "schedule": clock, "parameters": parameters}
    return str(served.ask(f"/deployments/{deployment['id']}/schedules", schedule)[0]["id"])


def completed(served: Serving) -> list[dict[str, Any]]:
    """The flow runs of schedules that have completed, in the order in which they began."""
    state = {"type": {"any_": ["COMPLETED"]}}
    runs = served.ask("/flow_runs/filter", flow_runs={"state": state}, sort="START_TIME_ASC", limit=50)
    return [run for run in runs if run["auto_scheduled"]]


def wait_for(served: Serving, number: int) -> list[dict[str, Any]]:
    until(lambda: len(completed(served)) >= number, served.log)
    return completed(served)[:number]


def run_of(flow_run: dict[str, Any]) -> str:
    return next(tag.removeprefix("run:") for tag in flow_run["tags"] if tag.startswith("run:"))


@pytest.mark.fault(
    "process",
    "Prefect's server and its worker restart between two firings of a schedule",
    "each firing trains a run of its own, with a new seed",
)
def test_each_firing_trains_from_scratch_through_restarts_of_server_and_worker(served: Serving) -> None:
    every(served, 60, **served.of_the_tiny_model(steps=1))
    wait_for(served, 1)
    worker = served.processes[-1]
    os.killpg(worker.pid, signal.SIGTERM)
    served.restart_server()
    served.worker()
    happened(f"SIGTERM to the server and to worker {worker.pid}")
    fired = wait_for(served, 3)
    assert [each["state_name"] for each in fired] == ["Completed"] * 3
    store = open_store(served.store)
    runs = [run_of(each) for each in fired]
    seeds = {store.runs.config(run)["seed"] for run in runs}
    policies = {entry.key for run in runs for entry in store.ledger.entries(run=run, stage="training")}
    assert (len(set(runs)), len(seeds), len(policies)) == (3, 3, 3)


def test_firings_behind_a_long_one_wait_and_train_the_run_further(served: Serving) -> None:
    first = served.start_run("sft/sft", **served.of_the_tiny_model(steps=1, name="grows"))
    assert served.ended(first)[0] == "COMPLETED"
    # Each firing takes longer than the time between two.
    schedule = every(served, 5, continue_run="grows", steps=1, presets=[])
    fired = wait_for(served, 3)
    assert [each["state_name"] for each in fired] == ["Completed"] * 3, schedule
    store = open_store(served.store)
    trained = sorted(entry.step for entry in store.ledger.entries(run="grows", stage="training"))
    assert trained[:4] == [0, 1, 2, 3] and {run_of(each) for each in fired} == {"grows"}
    for before, after in pairwise(fired):
        assert before["end_time"] <= after["start_time"], "one process at a time, however fast the clock"
