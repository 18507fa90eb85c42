"""What is set in the process of an environment server, and what verifiers does there by itself."""

import asyncio

import pytest
import verifiers.v1 as vf
from verifiers.v1 import env as rollouts
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.runtimes import prime
from verifiers.v1.utils.loaders import load_environment

from configs.environments import EnvironmentConfig
from tasks.inference.environment_config import resolved
from tasks.inference.environment_host import LABELS_VARIABLE, label_sandboxes

pytestmark = pytest.mark.engine

REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "reverse_text", "num_examples": 1})


def test_labels_of_the_section_come_before_those_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime, "BASE_LABELS", [])
    monkeypatch.setenv(LABELS_VARIABLE, '["run-7", "mine"]')
    label_sandboxes()
    assert prime.BASE_LABELS == ["run-7", "mine"]
    own = REVERSE.model_copy(update={"runtime": {"type": "prime", "labels": ["grader"], "cpu": 2.0}})
    runtime = resolved(own.model_dump(mode="json")).agent.runtime
    assert (runtime.labels, runtime.cpu) == (["grader"], 2.0)


def test_every_rollout_counts_towards_giving_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def trim() -> None:
        asked.append(1)

    async def one() -> vf.Episode:
        environment = load_environment(resolved(REVERSE.model_dump(mode="json")))
        context = ModelContext(client=EvalClientConfig(base_url="http://127.0.0.1:9/v1"), model="m")
        (slot,) = environment.slots(next(iter(environment.taskset)))
        async with environment.serving():
            await environment.run_slot(slot, context)
        return slot.episode

    monkeypatch.setattr(rollouts, "trim_memory_periodically", trim)
    assert not asyncio.run(one()).ok, "no model answers there"
    assert asked == [1]
