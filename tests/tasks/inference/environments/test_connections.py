"""Connections to an environment server: episodes, refusals, and the key of a run."""

import asyncio

import pytest
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.types import SamplingConfig

from configs.environments import EnvironmentConfig
from tasks.inference.environments import connections, servers
from tasks.inference.environments.connections import connect
from tests.fixtures.hosts import served
from tests.fixtures.waiting import PATIENCE

pytestmark = pytest.mark.engine

REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 2})


async def play(connection, **task):
    """A rollout with a model that nobody serves: it ends with that as its error."""
    client = EvalClientConfig(base_url="http://127.0.0.1:9/v1")
    return await connection.run(client, "m", SamplingConfig(seed=3), {"idx": 0, **task})


def connected(address, use):
    """What `use` returns of a connection."""

    async def run():
        connection = connect(address)
        try:
            return await asyncio.wait_for(use(connection), PATIENCE)
        finally:
            await connection.close()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with served(REVERSE, tmp_path_factory.mktemp("reverse")) as told:
        yield told["address"]


def test_an_error_of_the_server_is_the_rollout_s_own(address):
    async def use(connection):
        rollouts = (play(connection, text="abc", prompt=[1]), play(connection, text="abc", prompt="Reverse abc"))
        return await asyncio.gather(*rollouts, return_exceptions=True)

    refused, episode = connected(address, use)
    assert isinstance(refused, RuntimeError) and str(refused).startswith("ValidationError: ")
    (trace,) = episode.traces
    assert [error.type for error in trace.errors] == ["ProviderError"]


def test_a_sealed_server_answers_holders_of_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv(servers.KEY_VARIABLE, "the key of a run")
    monkeypatch.setattr(connections, "_keys", {})
    with served(REVERSE, tmp_path) as told:
        assert not servers.answers(told["address"], 2.0), "without a key"
        connections.remember_key(told["address"], "another key")
        assert not servers.answers(told["address"], 2.0)
        connections.remember_key(told["address"], "the key of a run")
        assert servers.answers(told["address"], 60.0)
