"""Schedules with a real Prefect server and worker: each firing trains, also after restarts and behind a long one."""

import os
import signal
from itertools import pairwise

import pytest

from storage.store import open_store
from tests.fixtures.faults import happened
from tests.fixtures.histories import results
from tests.fixtures.serving import ROOT, serving
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served")) as started:
        yield started


def three_firings(served):
    fired = served.wait_for_firings(3)
    assert [each["state_name"] for each in fired] == ["Completed"] * 3
    return fired


@pytest.mark.fault(
    "process",
    "Prefect's server and its worker restart between two firings of a schedule",
    "each firing trains a run of its own, with a new seed",
)
def test_each_firing_trains_from_scratch_through_restarts_of_server_and_worker(served):
    served.schedule(60, **served.of_the_tiny_model(steps=1))
    served.wait_for_firings(1)
    worker = served.processes[-1]
    os.killpg(worker.pid, signal.SIGTERM)
    served.restart_server()
    served.worker()
    happened(f"SIGTERM to the server and to worker {worker.pid}")
    fired = three_firings(served)
    store = open_store(served.store)
    runs = [served.run_of(each) for each in fired]
    seeds = {store.runs.config(run)["seed"] for run in runs}
    policies = {entry.key for run in runs for entry in results(store, "training", run)}
    assert (len(set(runs)), len(seeds), len(policies)) == (3, 3, 3)


def test_firings_behind_a_long_one_wait_and_train_the_run_further(served):
    first = served.start_run("sft/sft", **served.of_the_tiny_model(steps=1, name="grows"))
    assert served.ended(first)[0] == "COMPLETED"
    # Each firing takes longer than the time between two.
    served.schedule(5, continue_run="grows", steps=1, presets=[])
    fired = three_firings(served)
    store = open_store(served.store)
    trained = sorted(entry.step for entry in results(store, "training", "grows"))
    assert trained[:4] == [0, 1, 2, 3] and {served.run_of(each) for each in fired} == {"grows"}
    for before, after in pairwise(fired):
        assert before["end_time"] <= after["start_time"], "one process at a time, however fast the clock"


def test_scheduled_evaluations_score_each_new_policy_under_the_config_of_its_run(served):
    small = str(ROOT / "tests/acceptance/small.toml")
    settings = [f"model.path={served.place / 'model'}", "evaluation.num_examples=3", "steps=1", "--name", "one"]
    commands = [["run", "demo", small, *settings], ["resume", "one", "steps=2"], ["resume", "one", "steps=3"]]
    for version, command in enumerate(commands, start=1):
        done = served.stagecoach(*command, "--store", str(served.store))
        assert done.returncode == 0, done.stdout + done.stderr
        if version == 1:
            served.schedule(60, "evaluate/evaluate", policy="latest")
        until(lambda: version in scored_versions(served), served.log)  # noqa: B023
    runs = [served.run_of(firing) for firing in served.completed_firings()]
    store = open_store(served.store)
    configs = [store.runs.config(run) for run in runs]
    assert len(set(runs)) == len(runs) >= 3
    assert {config["evaluation"]["policy"] for config in configs} == {"one:1", "one:2", "one:3"}
    assert {config["evaluation"]["num_examples"] for config in configs} == {3}
    assert all(results(store, "rollout", run) for run in runs)


def scored_versions(served):
    """Return the versions of run `one` that completed evaluations of a schedule have scored."""
    runs = open_store(served.store).runs
    policies = [runs.config(served.run_of(firing))["evaluation"]["policy"] for firing in served.completed_firings()]
    return {int(policy.removeprefix("one:")) for policy in policies}
