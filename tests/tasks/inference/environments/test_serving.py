"""A server of ours sends an episode once to a sampler that reads it whole, and change by change to anybody else."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from configs.environments import EnvironmentConfig
from tasks.inference.environments import servers
from tests.fixtures.hosts import PLUGINS, served
from tests.fixtures.waiting import PATIENCE

pytestmark = pytest.mark.engine

HOLDS = EnvironmentConfig(name="holding", taskset={"id": "misbehaving_taskset", "faults": ["holds"]})
REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "sample_reverse_text", "num_examples": 2})


def request(**task: Any) -> dict[str, Any]:
    """A rollout with a model that nobody serves: it ends with that as its error."""
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.serve.types import RunRequest
    from verifiers.v1.types import SamplingConfig

    client = EvalClientConfig(base_url="http://127.0.0.1:9/v1")
    asked = RunRequest(task_data={"idx": 0, **task}, client=client, model="m", sampling=SamplingConfig(seed=3))
    return dict(asked.model_dump(mode="json"))


def shape(value: Any) -> Any:
    """A value with types in place of what differs between two rollouts."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    return [shape(each) for each in value] if isinstance(value, list) else type(value).__name__


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(REVERSE, tmp_path_factory.mktemp("reverse")) as told:
        yield told["address"]


def test_an_episode_is_the_same_in_one_piece_and_in_changes(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.inference.sampling import rollout_client

    async def episodes() -> list[dict[str, Any]]:
        client, found = rollout_client.RolloutClient(address), []
        for word in (rollout_client.UNWATCHED, "a word that no server knows"):
            monkeypatch.setattr(rollout_client, "UNWATCHED", word)
            found.append(await client.run(request(text="abc", prompt="Reverse inside abc")))
        client.close()
        return found

    whole, streamed = asyncio.run(episodes())
    assert whole.keys() < streamed.keys(), "of the episode itself only what is read"
    assert [trace["errors"][-1]["type"] for trace in whole["traces"]] == ["ProviderError"]
    assert shape(whole) == shape({name: streamed[name] for name in whole})


def test_a_client_of_verifiers_is_served_as_ever(address: str) -> None:
    from verifiers.v1.serve.client import EnvClient
    from verifiers.v1.serve.types import RunRequest

    asked, deltas = RunRequest.model_validate(request(text="abc", prompt="x")), list[Any]()

    async def run() -> Any:
        client = EnvClient(address)
        try:
            return await client.run(asked.client, asked.model, asked.sampling, asked.task_data, deltas.append)
        finally:
            await client.close()

    assert len(asyncio.run(run()).traces) == 1 and len(deltas) > 1


def test_an_error_of_the_server_is_the_rollout_s_own(address: str) -> None:
    from tasks.inference.sampling.rollout_client import RolloutClient

    async def run() -> list[Any]:
        client = RolloutClient(address)
        requests = (request(text="abc", prompt=[1]), request(text="abc", prompt="x"))
        found = await asyncio.gather(*map(client.run, requests), return_exceptions=True)
        client.close()
        return found

    refused, episode = asyncio.run(run())
    assert isinstance(refused, RuntimeError) and str(refused).startswith("ValidationError: ")
    assert len(episode["traces"]) == 1


def test_a_rollout_that_its_caller_leaves_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.inference.sampling.rollout_client import RolloutClient

    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", str(PLUGINS))
    log = tmp_path / "holding.log"

    async def leave(address: str) -> None:
        client = RolloutClient(address)
        rollout = asyncio.create_task(client.run(request(fault="holds", prompt="x")))
        while "misbehaving: holding" not in log.read_text():
            await asyncio.sleep(0.05)
        rollout.cancel()
        await asyncio.wait([rollout])
        while "cancelled run" not in log.read_text():
            await asyncio.sleep(0.05)
        client.close()

    with served(HOLDS, tmp_path) as told:
        asyncio.run(asyncio.wait_for(leave(told["address"]), PATIENCE))


def test_a_message_that_nobody_understands_concerns_no_other(caplog: pytest.LogCaptureFixture) -> None:
    from verifiers.v1.serve.delta import pack, unpack

    from tasks.inference.sampling.rollout_client import EPISODE, RolloutClient

    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"

    async def run() -> Any:
        client = RolloutClient(address)
        rollout = asyncio.create_task(client.run({"model": "m"}))
        await asyncio.sleep(0)
        sender, request_id, method, payload = await asyncio.to_thread(router.recv_multipart)
        assert (method, unpack(payload)) == (b"run", {"model": "m", "unwatched": True})
        for frames in ([b"one"], [request_id, b"delta", b"\xc1"], [b"another", b"reply", b""]):
            router.send_multipart([sender, *frames])
        router.send_multipart([sender, request_id, b"reply", pack({"success": True, EPISODE: {"traces": []}})])
        try:
            return await rollout
        finally:
            client.close()

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()) == {"traces": []}
    assert len(caplog.records) == 2
    router.close()
    context.term()


def test_a_sealed_server_answers_those_who_have_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.inference.sampling import sealed

    monkeypatch.setenv(sealed.KEY_VARIABLE, "the key of a run")
    monkeypatch.setattr(sealed, "_keys", {})
    with served(REVERSE, tmp_path) as told:
        assert not servers.answers(told["address"], 2.0), "without a key"
        sealed.remember_key(told["address"], "another key")
        assert not servers.answers(told["address"], 2.0)
        sealed.remember_key(told["address"], "the key of a run")
        assert servers.answers(told["address"], 60.0)
