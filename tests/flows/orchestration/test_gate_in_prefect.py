"""A run that waits for a person in a real Prefect: refused on the command line, cancelled, approved as on its page."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flows.cli.gate import decisions, embedded_urls
from flows.cli.runs import describe
from flows.queries.store_reader import StoreReader
from storage.store import open_store
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.driving import NAME, ROOT, SETTINGS, Driven
from tests.fixtures.histories import results
from tests.fixtures.programs import ask, environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
SECONDS = 240


class Waiting:
    """A life of a run in its own process, and how to ask its Prefect server."""

    def __init__(self, run, life):
        self.run, self.life = run, life

    def url(self):
        """The API, once it is there."""
        directory = self.run.store / "logs" / "prefect"
        return self.until(lambda: next(embedded_urls(directory), ""))

    def ask(self, path, **body):
        return ask(self.url(), path, body)

    def paused(self):
        """The flow run, once it waits."""
        return self.until(lambda: next(iter(self._of_state("PAUSED")), None))

    def end(self):
        """Wait until the run has ended; return how."""
        return self.life.result(timeout=SECONDS)

    def until(self, found):
        """What `found` returns as soon as it is something; the run must live as long."""
        deadline = time.monotonic() + SECONDS
        while not (result := found()):
            assert not self.life.done(), self.life.result().output
            assert time.monotonic() < deadline, "the run never came that far"
            time.sleep(0.2)
        return result

    def _of_state(self, state):
        try:
            return list(self.ask("/flow_runs/filter", flow_runs={"state": {"type": {"any_": [state]}}}))
        except OSError:
            return []  # not up yet


@pytest.fixture
def run(tmp_path_factory):
    """A run of one step behind a gate, of each test its own: a refusal leaves rows."""
    place = tmp_path_factory.mktemp("gate")
    model = tiny_qwen3(place / "tiny", hidden=64, layers=2, seed=3)
    return Driven(place, (*SETTINGS, f"model.path={model}", "gate.type=pause", "gate.timeout_seconds=600"))


@pytest.fixture
def waiting(run):
    """The run in a process of its own, that comes to its gate; the test answers."""
    with ThreadPoolExecutor(1) as threads:
        life = threads.submit(run.live, prefect=True, overrides=["steps=1"])
        yield Waiting(run, life)
        life.result(timeout=SECONDS)


def events(store):
    return [event.event for event in store.runs.events(NAME)]


@pytest.mark.nightly
def test_a_batch_is_refused_on_the_command_line(run, waiting):
    waiting.paused()
    words = ("gate", NAME, "--refuse", "--by", "Ada", "--reason", "too easy", "--store", str(run.store))
    command = [sys.executable, "-m", "flows.cli", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"refused by Ada; run {NAME} (train-")
    life = waiting.end()
    assert life.status != 0 and "step 0: the batch was refused by Ada: too easy" in life.output
    store = open_store(run.store)
    (row,) = decisions(store, NAME)
    assert (row["approved"], row["decided_by"], row["reason"]) == (False, "Ada", "too easy")
    assert json.loads(row["figures"])["num_traces"] == 12
    assert events(store) == ["started", "refused"] and not results(store, "training", NAME)


@pytest.mark.nightly
def test_a_run_that_is_cancelled_while_it_waits_ends_and_has_decided_nothing(run, waiting):
    place = f"/flow_runs/{waiting.paused()['id']}/set_state"
    before = decisions(open_store(run.store), NAME)
    polite = waiting.ask(place, state={"type": "CANCELLING"})
    assert polite["status"] == "REJECT"  # Prefect's own rule, so its page cannot cancel what is paused
    waiting.ask(place, state={"type": "CANCELLED"}, force=True)
    life = waiting.end()
    assert life.status != 0 and "cancelled while step 0 waited for approval" in life.output
    assert decisions(open_store(run.store), NAME) == before


def test_a_batch_is_approved_as_the_page_does_it_and_the_run_goes_on(run, waiting):
    flow_run = waiting.paused()

    def waits():
        seen = describe(StoreReader.at(run.store), NAME, open_store(run.store).runs.events(NAME)[-1])
        return (seen["waits_at_gate"], seen["steps_done"]) == (0, 0)

    waiting.until(waits)  # what is finished by then is committed while it waits
    (page,) = waiting.ask("/artifacts/latest/filter", artifacts={"key": {"any_": [f"gate-{NAME}"]}})
    assert page["data"].startswith(f"# {NAME}, step 0: may this batch be trained on?")
    assert "## best: reward" in page["data"]
    answer = f"/flow_runs/{flow_run['id']}/resume"
    unsigned = waiting.ask(answer, run_input={"approve": True})
    assert unsigned["status"] == "REJECT" and "'by' is a required property" in unsigned["details"]["reason"]
    waiting.ask(answer, run_input={"approve": True, "by": "Bo", "reason": ""})
    life = waiting.end()
    assert life.status == 0, life.output
    store = open_store(run.store)
    last = decisions(store, NAME)[-1]
    assert (last["approved"], last["decided_by"]) == (True, "Bo")
    assert events(store)[-1] == "finished" and len(results(store, "training", NAME)) == 1


@pytest.mark.nightly
def test_a_run_that_nobody_answers_ends_and_says_how_to_be_asked_again(run):
    life = run.live(name="unanswered", prefect=True, overrides=["steps=1", "gate.timeout_seconds=1"])
    assert (
        life.status != 0
        and "waits for approval of its batch and nobody answered within gate.timeout_seconds, 1." in life.output
    )
    store = open_store(run.store)
    last = store.runs.events("unanswered")[-1]
    assert last.event == "failed" and "stagecoach resume unanswered" in last.message
    assert not decisions(store, "unanswered") and len(results(store, "packing", "unanswered")) == 1
