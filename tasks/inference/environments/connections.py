"""RolloutConnection: verifiers' client of an environment server, which hands over kept turns as they end.

The sampler and the probes of health make one per server, in the event loop that uses it. Between machines a connection
is encrypted and open to holders of the run's key alone (CurveZMQ): the server's pair of keys is made of the key that
both ends share, and a client must know the public half before its first word, so that it serves as a password, too.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve.client import EnvClient
from zmq.utils import z85

from tasks.inference.trace_rows.rows import TURNS_FIELD, Row
from tasks.runtime.process_variables import bind_address

_keys: dict[str, str] = {}
"""By address of a server, the key that it shares with this process."""


def remember_key(address: str, key: str) -> None:
    """Seal the connections that this process makes to a server from now on."""
    _keys[address] = key


def seal_frontend(server: Any, key: str) -> None:
    """Bind the frontend of verifiers' server or pool anew, to a TCP port that takes sealed connections alone."""
    server.frontend.unbind(server.address)
    server.frontend.curve_secretkey = secret = _secret(key)
    server.frontend.curve_publickey = zmq.curve_public(secret)
    server.frontend.curve_server = True
    server.frontend.bind(f"tcp://{bind_address()}:0")
    server.address = server.frontend.getsockopt_string(zmq.LAST_ENDPOINT)


def _secret(key: str) -> bytes:
    return z85.encode(hashlib.sha256(f"environment server {key}".encode()).digest())


class RolloutConnection(EnvClient):  # type: ignore[misc]
    """Runs rollouts on one environment server, from the running event loop."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        if address in _keys:
            self.socket.disconnect(address)
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
            self.socket.curve_serverkey = zmq.curve_public(_secret(_keys[address]))
            self.socket.connect(address)

    async def play(
        self, client: Any, model: str, sampling: Any, task: Row, on_turn: Callable[[Mapping[str, str]], None]
    ) -> WireEpisode:
        """Run one rollout and return its episode.

        `on_turn` takes each kept turn as it ends: request, model and answer. Where the caller is cancelled, the server
        is asked to stop the rollout. Raises RuntimeError with the server's error, its type in front.
        """
        taken = set[str]()

        def take_turns(delta: Mapping[str, Any]) -> None:
            for turn in delta.get("set", {}).get("info", {}).get(TURNS_FIELD, ()):
                if turn["request"] not in taken:
                    taken.add(turn["request"])
                    on_turn(turn)

        return await self.run(client, model, sampling, task, take_turns)
