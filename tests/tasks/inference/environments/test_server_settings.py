"""What is set in the process of an environment server, and what verifiers does there by itself."""

import asyncio
from pathlib import Path

import pytest
import verifiers.v1 as vf
from verifiers.v1 import env as rollouts
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.runtimes import prime
from verifiers.v1.utils.loaders import load_environment

from configs.environments import EnvironmentConfig
from configs.run import RunConfig
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from tasks.inference.environments import servers as environments
from tasks.inference.environments.examples import verifiers_config
from tasks.inference.environments.host import LABELS_VARIABLE, label_sandboxes

pytestmark = pytest.mark.engine

REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "reverse_text", "num_examples": 1})


@pytest.mark.essential
def test_labels_of_the_section_come_before_those_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime, "BASE_LABELS", [])
    monkeypatch.setenv(LABELS_VARIABLE, '["run-7", "mine"]')
    label_sandboxes()
    assert prime.BASE_LABELS == ["run-7", "mine"]
    own = REVERSE.model_copy(update={"runtime": {"type": "prime", "labels": ["grader"], "cpu": 2.0}})
    runtime = verifiers_config(own.model_dump(mode="json")).agent.runtime
    assert (runtime.labels, runtime.cpu) == (["grader"], 2.0)


@pytest.mark.essential
def test_every_rollout_counts_towards_giving_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def trim() -> None:
        asked.append(1)

    async def one() -> vf.Episode:
        environment = load_environment(verifiers_config(REVERSE.model_dump(mode="json")))
        context = ModelContext(client=EvalClientConfig(base_url="http://127.0.0.1:9/v1"), model="m")
        (slot,) = environment.slots(next(iter(environment.taskset)))
        async with environment.serving():
            await environment.run_slot(slot, context)
        return slot.episode

    monkeypatch.setattr(rollouts, "trim_memory_periodically", trim)
    assert not asyncio.run(one()).ok, "no model answers there"
    assert asked == [1]


@pytest.mark.parametrize(
    ("said", "hangs"),
    [
        ([True], False),
        ([False, True], False),  # whoever asked was stopped meanwhile, or the server was only slow
        ([False, False], True),
        ([RuntimeError("the server says that something is wrong")], False),
        ([False, OSError(24, "Too many open files")], False),
    ],
)
def test_a_server_hangs_if_it_answers_neither_of_two_questions(
    said: list[bool | Exception], hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def answers(address: str, seconds: float) -> bool:
        asked.append(seconds)
        found = said[len(asked) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(environments, "answers", answers)
    assert environments.hangs("tcp://127.0.0.1:9", 20.0) == hangs
    assert asked == [20.0, 5.0][: len(said)]


def test_a_server_is_started_and_watched_as_its_section_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []
    monkeypatch.setattr(environments, "hangs", lambda *question: bool(asked.append(question)))
    own = REVERSE.model_copy(update={"startup_seconds": 10.0, "hang_seconds": 5.0, "max_restarts": 7})
    spec = EnvironmentServers(Supervisor("run", tmp_path), RunConfig(environments=(own,)), "key")._spec(own)
    assert (spec.startup_seconds, spec.max_restarts, spec.external) == (15.0, 7, "")
    assert spec.hangs is not None and not spec.hangs({"address": "tcp://127.0.0.1:9"})
    assert asked == [("tcp://127.0.0.1:9", 5.0)]
