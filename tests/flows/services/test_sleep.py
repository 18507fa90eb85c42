"""A real engine sleeps while a real learner has its turn, and either is killed in every state between.

The CPU's engine takes the calls and keeps its memory: what is shown is the protocol, its order and its locks. An engine
that wakes is never handed out without its policy's weights, which its checksum proves each time.
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from flows.services.learner import LearnerProcess
from tasks.inference.engine.client import Engine, EngineLost
from tasks.learner.tiny import tiny_qwen3
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import recorded_first, small_run
from tests.fixtures.waiting import PATIENCE, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
POLICY = Policy("first", 0)


@dataclass(frozen=True)
class Machine:
    """An engine and a learner that share a GPU, were there one."""

    engine: InferenceService
    learner: LearnerProcess
    directory: Path

    def handle(self, service):
        return service.handles[0]

    def generation(self, service):
        return self.handle(service).generation

    def kill(self, service):
        """Kill a service; return the generation that it was."""
        generation = self.generation(service)
        os.kill(self.handle(service).report["pid"], signal.SIGKILL)
        return generation

    def learns(self):
        """Tell whether the learner holds the first policy and computes with it."""
        return self.learner.load_fresh(POLICY, self.directory).probe([1, 2, 3])

    def client(self):
        return closing(Engine(self.handle(self.engine).wait()["url"], self.engine.key))

    def serves(self):
        """Tell whether the engine holds and answers by the policy's weights, after it was brought to them."""
        self.engine.serve(POLICY)
        with self.client() as client:
            return not client.is_sleeping() and client.state().policy_key == POLICY.key and client.healthy()


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sleep")
    model = tiny_qwen3(directory / "model", seed=3)
    context = small_run(directory, model, sleep=True, max_restarts=9)
    with Supervisor("a", directory / "logs") as supervisor:
        engine = InferenceService(supervisor, context, model)
        learner = LearnerProcess(supervisor, context, engine.asleep)
        found = Machine(engine, learner, model)
        engine.begin()
        with learner.turn():
            client = learner.load_fresh(POLICY, model)
            recorded_first(context.store, "a", POLICY, client, model)
        yield found


def test_it_sleeps_for_the_learner_and_wakes_for_rollouts(machine):
    assert machine.serves()
    with machine.learner.turn(), machine.client() as client:
        assert client.is_sleeping() and client.state().policy_key == ""
        assert machine.learns()
    with machine.client() as client:
        assert client.is_sleeping(), "it wakes when it is asked for a policy, and not before"
    assert machine.serves()


def test_a_turn_waits_for_those_who_sample_and_they_for_it(machine):
    order = []

    def train():
        with machine.learner.turn():
            order.append("trained")

    with ThreadPoolExecutor(1) as threads:
        with machine.engine.pinned(POLICY):
            done = threads.submit(train)
            time.sleep(0.5)
            order.append("sampled")
        done.result(PATIENCE)
        begun, end = threading.Event(), threading.Event()

        def hold():
            with machine.learner.turn():
                begun.set()
                end.wait(PATIENCE)
                order.append("trained again")

        done = threads.submit(hold)
        assert begun.wait(PATIENCE)
        threading.Timer(0.5, end.set).start()
        with machine.engine.pinned(POLICY):
            order.append("sampled again")
        done.result(PATIENCE)
    assert order == ["sampled", "trained", "trained again", "sampled again"]


@pytest.mark.nightly
def test_the_engine_is_killed_before_it_sleeps(machine):
    assert machine.serves()
    killed = machine.kill(machine.engine)
    with machine.learner.turn(), machine.client() as client:
        assert client.is_sleeping() and machine.generation(machine.engine) == killed + 1
    assert machine.serves()


@pytest.mark.nightly
def test_the_engine_is_killed_asleep_and_stays_away_from_the_learner_s_memory(machine):
    with machine.learner.turn():
        handle = machine.handle(machine.engine)
        killed = machine.kill(machine.engine)
        until(lambda: not handle.alive, lambda: "it outlived SIGKILL")
        time.sleep(1)
        assert handle.generation == killed, "it would take the memory that the learner has"
        assert machine.learns()
    assert machine.serves() and handle.generation == killed + 1


def test_the_learner_is_killed_while_the_engine_sleeps(machine):
    engine = machine.generation(machine.engine)
    with machine.learner.turn():
        killed = machine.kill(machine.learner)
        until(lambda: machine.generation(machine.learner) == killed + 1, lambda: "not started again")
        assert machine.learns()
    assert machine.serves() and machine.generation(machine.engine) == engine


@pytest.mark.nightly
def test_the_engine_is_killed_before_it_wakes(machine):
    with machine.learner.turn():
        pass
    killed = machine.kill(machine.engine)
    assert machine.serves() and machine.generation(machine.engine) == killed + 1


@pytest.mark.nightly
@pytest.mark.parametrize("dies", [True, False])
def test_it_is_awake_and_not_handed_over_yet(machine, monkeypatch, dies):
    """Killed, or the hand-over failed: half awake, it goes on from there."""
    with machine.learner.turn():
        pass
    before, call, states = machine.generation(machine.engine), Engine._call_workers, []

    def fail_once(self, method, **arguments):
        if not states:
            states.append((self.is_sleeping(), self.state().policy_key))
            if dies:
                machine.kill(machine.engine)
            raise EngineLost("at the hand-over")
        call(self, method, **arguments)

    monkeypatch.setattr(Engine, "_call_workers", fail_once)
    assert machine.serves() and states == [(True, "")]
    assert machine.generation(machine.engine) == before + dies
