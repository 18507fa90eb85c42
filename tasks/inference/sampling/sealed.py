"""Connections to environment servers of other machines: encrypted, and only for who has the run's key (CurveZMQ).

The server's pair of keys is made of the key that both ends share. A client must know the public half before it says its
first word, and nobody else ever sees it, so that it serves as a password, too.
"""

import hashlib

import zmq
from zmq.utils import z85

KEY_VARIABLE = "STAGECOACH_ENVIRONMENT_KEY"
"""The variable by which a server gets the key."""
_keys: dict[str, str] = {}
"""By address of a server, the key that it shares with this process."""


def remember_key(address: str, key: str) -> None:
    """Seal the connections that this process makes to a server from now on."""
    _keys[address] = key


def connect(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Connect a socket to an environment server, sealed where its key is known."""
    if address in _keys:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = zmq.curve_public(_secret(_keys[address]))
    socket.connect(address)


def seal_routers(key: str) -> None:
    """Let every router that this process binds to a TCP port take sealed connections alone; for an own process."""
    bind = zmq.Socket.bind

    def bind_sealed(self: "zmq.Socket[bytes]", address: str) -> object:
        if address.startswith("tcp://") and self.getsockopt(zmq.TYPE) == zmq.ROUTER:
            self.curve_secretkey = secret = _secret(key)
            self.curve_publickey = zmq.curve_public(secret)
            self.curve_server = True
        return bind(self, address)

    zmq.Socket.bind = bind_sealed  # type: ignore[method-assign, assignment]


def _secret(key: str) -> bytes:
    return z85.encode(hashlib.sha256(f"environment server {key}".encode()).digest())
