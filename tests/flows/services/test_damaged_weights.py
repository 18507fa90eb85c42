"""Weights of which a bit was flipped reach neither a learner nor an engine, whoever asks for them."""

import json
import time
from pathlib import Path

import pytest

from configs.run import RunConfig
from flows.runtime.resolve_run import whole_weights
from flows.services.base import Supervisor
from flows.services.engine import InferenceService
from flows.services.learner_recovery import LearnerRecovery
from storage.errors import DamagedSlice
from storage.policies.manifest import BASE_FILE
from storage.store import open_store
from tasks.inference.engine.client import EngineState
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Policy
from tests.fixtures.faults import spoil
from tests.fixtures.histories import policy_row, record_policy

FILES = ("model.safetensors", "optimizer.safetensors")


class Untouched:
    """A learner or an engine that must not be asked for anything that loads weights."""

    served = ""

    def __init__(self, *_, **__):
        self.loaded = []

    def load(self, policy_key, directory, **_):
        self.loaded.append(policy_key)

    def serve(self, policy_key, *_, **others):
        raise AssertionError(f"{policy_key} was handed over")

    def state(self):
        return EngineState(self.served, self.served, [], False)

    def close(self):
        pass


@pytest.fixture
def context(root):
    """A run whose only policies came in: whole weights, and an adapter over them."""
    store = open_store(root)
    for key in ("whole", "adapter"):
        scratch = store.policies.scratch(key)
        for name in FILES:
            (scratch / name).write_bytes(f"{key} {name}".encode() * 50)
        if key == "adapter":
            (scratch / BASE_FILE).write_text(json.dumps({"policy_key": "whole"}))
        store.policies.publish(scratch, key)
        record_policy(store, key, policy_row(key, 0, None, has_optimizer=True), "policy_import")
    return RunContext(store, "a", RunConfig(name="a"), {})


def recover(context, policy):
    learner = Untouched()
    LearnerRecovery(learner, context, ({}, {})).recover(Policy(policy, 0))
    return learner.loaded


def serve(context, policy):
    service = InferenceService(Supervisor("a", Path("logs")), context, Path("model"))
    return service._load(Policy(policy, 0), "http://127.0.0.1:1")


def test_whole_weights_are_loaded(context):
    assert recover(context, "whole") == ["whole"]


@pytest.mark.fault("weights", "one bit of weights or optimizer state is flipped", "nothing loads them")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("use", [recover, serve, lambda context, key: whole_weights(context.store, key)])
@pytest.mark.parametrize("policy", ["whole", "adapter"])  # of an adapter, the weights below it are damaged
def test_one_flipped_bit_is_refused(context, monkeypatch, name, use, policy):
    monkeypatch.setattr("flows.services.engine.Engine", Untouched)
    file = context.store.policies.directory("whole") / name
    data = bytearray(file.read_bytes())
    data[20] ^= 4
    time.sleep(0.02)  # a step of the file system's clock
    spoil(file, bytes(data))
    with pytest.raises(DamagedSlice, match=f"{name} is not the file that was written"):
        use(context, policy)
