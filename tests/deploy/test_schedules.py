"""Schedules with a real Prefect server and worker: each firing trains, also after restarts and behind a long one."""

import os
import signal
from collections.abc import Iterator
from itertools import pairwise

import pytest

from storage.store import open_store
from tests.fixtures.faults import happened
from tests.fixtures.serving import Serving, serving

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("served")) as started:
        yield started


@pytest.mark.fault(
    "process",
    "Prefect's server and its worker restart between two firings of a schedule",
    "each firing trains a run of its own, with a new seed",
)
def test_each_firing_trains_from_scratch_through_restarts_of_server_and_worker(served: Serving) -> None:
    served.schedule(60, **served.of_the_tiny_model(steps=1))
    served.wait_for_firings(1)
    worker = served.processes[-1]
    os.killpg(worker.pid, signal.SIGTERM)
    served.restart_server()
    served.worker()
    happened(f"SIGTERM to the server and to worker {worker.pid}")
    fired = served.wait_for_firings(3)
    assert [each["state_name"] for each in fired] == ["Completed"] * 3
    store = open_store(served.store)
    runs = [served.run_of(each) for each in fired]
    seeds = {store.runs.config(run)["seed"] for run in runs}
    policies = {entry.key for run in runs for entry in store.ledger.entries(run=run, stage="training")}
    assert (len(set(runs)), len(seeds), len(policies)) == (3, 3, 3)


def test_firings_behind_a_long_one_wait_and_train_the_run_further(served: Serving) -> None:
    first = served.start_run("sft/sft", **served.of_the_tiny_model(steps=1, name="grows"))
    assert served.ended(first)[0] == "COMPLETED"
    # Each firing takes longer than the time between two.
    schedule = served.schedule(5, continue_run="grows", steps=1, presets=[])
    fired = served.wait_for_firings(3)
    assert [each["state_name"] for each in fired] == ["Completed"] * 3, schedule
    store = open_store(served.store)
    trained = sorted(entry.step for entry in store.ledger.entries(run="grows", stage="training"))
    assert trained[:4] == [0, 1, 2, 3] and {served.run_of(each) for each in fired} == {"grows"}
    for before, after in pairwise(fired):
        assert before["end_time"] <= after["start_time"], "one process at a time, however fast the clock"
