"""A real learner sends policies to a real engine by vLLM's weight transfer, over gloo, and either is killed on the way.

Two policies take turns, so that weights of the one before would be seen: `serve` hands an engine out only with the
checksum and the log-probs of the policy that it was asked for.
"""

import logging
import os
import signal
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pytest

from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from flows.services.learner import LearnerProcess
from tasks.inference.engine.client import Engine
from tasks.inference.engine.transfer import State, WeightTransfer
from tasks.learner.tiny import tiny_qwen3
from tasks.runtime.stage import Policy
from tests.fixtures.hosts import recorded_first, small_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
SENT = [State.ANNOUNCED, State.RECEIVING, State.LOADED, State.PROVEN]


def at(states):
    """The cases of some states; CI takes the one in the middle of a transfer."""
    return [pytest.param(state, marks=[] if state is State.RECEIVING else pytest.mark.nightly) for state in states]


@dataclass(frozen=True)
class Machine:
    """An engine, a learner, and two policies."""

    engine: InferenceService
    learner: LearnerProcess
    context: object
    policies: list

    def other_policy(self):
        """Return the policy that the engine does not serve."""
        with closing(Engine(self.engine.handles[0].wait()["url"], self.engine.key)) as client:
            served = client.state().policy_key
        return next(policy for policy in self.policies if policy.key != served)

    def held_policy(self):
        """Return it after the learner has loaded it."""
        policy = self.other_policy()
        with self.learner.turn():
            self.learner.load_fresh(policy, self.context.store.policies.directory(policy.key))
        return policy

    def kill(self, service):
        os.kill(service.handles[0].report["pid"], signal.SIGKILL)


@contextmanager
def machine_in(directory, **settings):
    """A learner that holds the first of two policies, and an engine that has begun, with `settings` of a small run."""
    models = {f"policy{seed}": tiny_qwen3(directory / f"model{seed}", seed=seed) for seed in (3, 4)}
    first = models["policy3"]
    context = small_run(directory, first, weight_transfer="gloo", max_restarts=20, **settings)
    with Supervisor("a", directory / "logs") as supervisor:
        engine = InferenceService(supervisor, context, first)
        engine.learner = learner = LearnerProcess(supervisor, context)
        engine.begin()
        policies = [Policy(key, 0) for key in models]
        for policy, model in zip(policies, models.values(), strict=True):
            recorded_first(context.store, "a", policy, learner.load_fresh(policy, model), model)
        yield Machine(engine, learner, context, policies)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    with machine_in(tmp_path_factory.mktemp("transfer")) as made:
        yield made


@pytest.fixture
def entered(monkeypatch):
    """The states that transfers have entered, and what is done at some of them, once."""
    states, plans, enter = [], {}, WeightTransfer.enter

    def note(self, state):
        enter(self, state)
        states.append(state)
        plans.pop(state, lambda: None)()

    monkeypatch.setattr(WeightTransfer, "enter", note)
    return states, plans


def test_policies_go_from_memory_to_memory(machine, entered):
    states, _ = entered
    for _ in range(3):
        machine.engine.serve(machine.held_policy())
    assert states == SENT * 3


def test_a_policy_that_the_learner_does_not_hold_or_has_no_time_for_comes_from_its_files(machine, entered):
    states, _ = entered
    policy = machine.held_policy()
    with machine.learner.turn():
        machine.engine.serve(policy)
    machine.engine.serve(machine.other_policy())
    assert states == [State.ANNOUNCED, State.IDLE] * 2


@pytest.mark.parametrize("state", at(SENT[:-1]))
def test_the_learner_is_killed_and_the_policy_comes_from_its_files(machine, entered, caplog, state):
    states, plans = entered
    policy = machine.held_policy()
    plans[state] = lambda: machine.kill(machine.learner)
    machine.engine.serve(policy)
    assert states == [*SENT[: SENT.index(state) + 1], State.IDLE]
    assert [record for record in caplog.records if record.levelno == logging.WARNING]
    machine.engine.serve(machine.held_policy())
    assert states[-4:] == SENT


def test_the_learner_is_killed_after_half_of_the_tensors(machine, entered, monkeypatch):
    policy, call = machine.held_policy(), Engine.call

    def call_half(self, route, content):
        if route == "update_weights":
            content = {"update_info": {name: part[: len(part) // 2] for name, part in content["update_info"].items()}}
        call(self, route, content)
        if route == "update_weights":
            machine.kill(machine.learner)

    monkeypatch.setattr(Engine, "call", call_half)
    machine.engine.serve(policy)
    assert entered[0] == [State.ANNOUNCED, State.RECEIVING, State.IDLE]


@pytest.mark.parametrize("state", at(SENT))
def test_the_engine_is_killed_and_the_next_one_has_the_policy(machine, entered, state):
    states, plans = entered
    policy = machine.held_policy()
    plans[state] = lambda: machine.kill(machine.engine)
    machine.engine.serve(policy)
    assert states == [*SENT[: SENT.index(state) + 1], *SENT]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "num_engines"),
    [({"processes": 2, "replicas": 2}, 2), ({"processes": 2, "extra_arguments": ["--tensor-parallel-size=2"]}, 1)],
    ids=["ranks and replicas", "ranks and workers"],
)
def test_ranks_send_to_each_engine_and_each_of_its_workers(tmp_path, entered, monkeypatch, settings, num_engines):
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")  # else it wants a NUMA node for each
    states, plans = entered
    with machine_in(tmp_path, **settings) as machine:
        assert len(machine.engine.handles) == num_engines
        for _ in range(2):
            machine.engine.serve(machine.held_policy())
        assert Counter(states) == Counter(SENT * 2 * num_engines)
        plans[State.RECEIVING] = lambda: machine.kill(machine.learner)
        del states[:]
        machine.engine.serve(machine.held_policy())
        assert State.IDLE in states
        del states[:]
        machine.engine.serve(machine.held_policy())
        assert Counter(states) == Counter(SENT * num_engines)
