"""Sealed connections to environment servers, by verifiers' own client.

The sampler and the probes of health make one per server, in the event loop that uses it. Between machines a connection
is encrypted and open to holders of the run's key alone (CurveZMQ): the server's pair of keys is made of the key that
both ends share, and a client must know the public half before its first word, so that it serves as a password, too.
"""

import hashlib
from typing import Any

import zmq
from verifiers.v1.serve.client import EnvClient
from zmq.utils import z85

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


def connect(address: str) -> EnvClient:
    """Return a client of an environment server for the running event loop; sealed where a key of it is known."""
    client = EnvClient(address)
    if address in _keys:
        client.socket.disconnect(address)
        client.socket.curve_publickey, client.socket.curve_secretkey = zmq.curve_keypair()
        client.socket.curve_serverkey = zmq.curve_public(_secret(_keys[address]))
        client.socket.connect(address)
    return client
