"""A learner that was given up and goes on writing: what is committed is its replacement's, bit by bit."""

import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.run import RunConfig
from storage.policies.manifest import digest_files
from storage.store import open_store
from tasks.learner.client import Learner
from tasks.learner.protocol import STATISTICS_FILE, LearnerLost
from tasks.learner.tiny import tiny_qwen3
from tasks.runtime.run_context import RunContext
from tasks.runtime.services import Services
from tasks.runtime.stage import Policy, perform
from tasks.training.stage import STAGE
from tests.fixtures.builders import stage_of
from tests.fixtures.faults import happened
from tests.fixtures.learner_steps import configure
from tests.fixtures.packed import batches, sample
from tests.fixtures.waiting import PATIENCE, until
from tests.tasks.learner.processes import process

ROWS = batches([[sample(f"{number}", 250, number)] for number in range(40)])
"""Some seconds of training: long enough to be stopped in it."""


@pytest.fixture
def context(root):
    config = RunConfig.model_validate({"name": "a", "training": {"learning_rate": 1e-2}, "model": {"vocab_size": 256}})
    return RunContext(open_store(root), "a", config, {})


def trained(context, learners):
    """Train a step with one learner after another, as each is lost; return its policy's key and files."""
    given = iter(learners)
    service = SimpleNamespace(restore=lambda policy: next(given), turn=nullcontext, state_directory="")
    packed = perform(stage_of("packing", lambda tables, config: {"batches": ROWS}, ("batches",)), context, 0)
    done = perform(STAGE, context, 0, (packed,), Policy("p0", 0), Services(learner=service))
    policy = context.store.policies.find(done.key)
    context.store.policies.directory(done.key, verify=True)
    return done.key, policy.files


@pytest.mark.fault("services", "a learner that was given up writes later", "the policy of the one after it, to the bit")
@pytest.mark.engine
def test_a_real_learner_that_was_cut_off_writes_its_policy_late(context, tmp_path):
    given, threads, made = [], [], {}
    model = tiny_qwen3(tmp_path / "model", hidden=32, layers=2, intermediate=64, seed=3)
    with process(tmp_path / "1") as (child, first), process(tmp_path / "2") as (_, second):
        # Another learning rate stands for another machine, whose weights differ in their last bits.
        one, two = connected(first["address"], model, 2e-2), connected(second["address"], model, 1e-2)

        def lose(batch, **asked):
            given.append(Path(asked["directory_out"]))
            threads.append(threading.Thread(target=lambda: one.train(batch, **asked), name="late"))
            threads[0].start()
            until((given[0] / STATISTICS_FILE).exists, lambda: "it has not begun", every=0.001)
            os.kill(child.pid, signal.SIGSTOP)
            happened(f"SIGSTOP to {child.pid} while it trained")
            assert not list(given[0].glob("*.safetensors")), "it was done before it was stopped"
            raise LearnerLost("cut off")

        def train(batch, **asked):
            updates = two.train(batch, **asked)
            made["replacement"] = digests(Path(asked["directory_out"]))
            os.kill(child.pid, signal.SIGCONT)
            threads[0].join(PATIENCE)
            made["late"] = digests(given[0])
            return updates

        replacement = SimpleNamespace(train=train, state=two.state, probe=two.probe)
        _, files = trained(context, (SimpleNamespace(train=lose), replacement))

    assert {each.path: each.sha256 for each in files} == made["replacement"]
    name = "model.safetensors"
    assert made["replacement"][name] != made["late"][name], "the two made the same, and the test shows nothing"
    assert given[0].exists(), "it has made its directory again"
    context.store.policies.discard(context.store.policies.scratch("next"))
    assert not given[0].exists(), "what it wrote is swept with the next one"


def connected(address, model, learning_rate):
    """Return a learner that holds the first policy."""
    learner = Learner(address)
    configure(learner, learning_rate=learning_rate)
    learner.load("p0", str(model), fresh_optimizer=True)
    return learner


def digests(directory):
    """Return the digests of a policy's files by name."""
    return {each.path: each.sha256 for each in digest_files(directory) if each.path != STATISTICS_FILE}
