"""What is set in the process of an environment server, what verifiers does there by itself, and tools that are gone."""

import asyncio
import signal
import socket
from pathlib import Path

import pytest
from verifiers.v1 import env as rollouts
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.runtimes import prime
from verifiers.v1.runtimes import subprocess as subprocess_runtime
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.utils.loaders import load_environment

from configs.environments import EnvironmentConfig
from configs.run import RunConfig
from flows.services.base import Supervisor
from flows.services.environments import EnvironmentServers
from flows.services.guardian import descendants, send
from tasks.inference.environments import servers as environments
from tasks.inference.environments.examples import verifiers_config
from tasks.inference.environments.host import refuses, set_up_runtimes
from tasks.inference.environments.servers import answers
from tests.fixtures.waiting import PATIENCE, until

pytestmark = pytest.mark.engine

REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 1})


@pytest.mark.essential
def test_labels_of_the_section_come_before_those_of_the_runtime(monkeypatch, tmp_path):
    monkeypatch.setattr(prime, "BASE_LABELS", [])
    monkeypatch.setattr(subprocess_runtime, "CACHE_DIR", None)
    set_up_runtimes({"sandbox_labels": ["run-7", "mine"]}, tmp_path)
    assert tmp_path == subprocess_runtime.CACHE_DIR
    assert prime.BASE_LABELS == ["run-7", "mine"]
    own = REVERSE.model_copy(update={"runtime": {"type": "prime", "labels": ["grader"], "cpu": 2.0}})
    runtime = verifiers_config(own.model_dump(mode="json")).agent.runtime
    assert (runtime.labels, runtime.cpu) == (["grader"], 2.0)


@pytest.mark.essential
def test_every_rollout_counts_towards_giving_memory_back(monkeypatch):
    asked = []

    async def trim():
        asked.append(1)

    async def one():
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
def test_a_server_hangs_if_it_answers_neither_of_two_questions(said, hangs, monkeypatch):
    asked = []

    async def health(connection, seconds):
        asked.append(seconds)
        found = said[len(asked) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(EnvClient, "health", health)
    assert environments.hangs("tcp://127.0.0.1:9", 20.0) == hangs
    assert asked == [20.0, 5.0][: len(said)]


def commands(pid):
    """Return the command lines of the processes below one."""
    found = {}
    for each in descendants(pid):
        try:
            found[each] = Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.nightly
def test_a_server_without_its_tools_is_started_again(tmp_path):
    environment = {"name": "calc", "taskset": {"id": "sample_calc_tools", "num_examples": 4}}
    config = RunConfig.model_validate({"environments": [environment]})
    with Supervisor("tools", tmp_path) as supervisor:
        servers = EnvironmentServers(supervisor, config, "")
        servers.addresses(["calc"])
        handle = servers._handles["calc"]
        before = handle.generation
        below = commands(handle.report["pid"])
        tools = [pid for pid, line in below.items() if "sample_calc_tools.server" in line]
        assert tools, below
        send(signal.SIGKILL, tools)  # one may go by itself when another has
        until(lambda: handle.generation != before, lambda: (tmp_path / "environment-calc.log").read_text()[-3000:])
        assert answers(servers.addresses(["calc"])["calc"][0], PATIENCE)
    log = (tmp_path / "environment-calc.log").read_text()
    assert "the shared tool server" in log and "is gone: the environment server ends" in log


def test_only_a_refusal_is_one():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert asyncio.run(refuses("127.0.0.1", port)), "bound, and nobody listens"
        listening.listen()
        assert not asyncio.run(refuses("127.0.0.1", port)), "nobody accepts, but connections are taken"
    assert asyncio.run(refuses("127.0.0.1", port)), "and none is left"
