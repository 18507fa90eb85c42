"""ZeroMQ on an event loop, for processes that exchange thousands of short messages."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq

_log = logging.getLogger(__name__)


class FrameSocket:
    """A socket of the running event loop: everything that has come is handed over in one round of the loop.

    Sending never waits: the socket must have no limit on what waits to be sent. zmq.asyncio, in its place, makes a
    future for each message and asks the socket for its state several times, which takes longer than the message.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_frames: Callable[[list[bytes]], Any]) -> None:
        """Begin to receive; an error of `on_frames` is logged and concerns one message alone."""
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._loop.add_reader(self._descriptor, self._receive)
        self._scheduled = True
        self._loop.call_soon(self._receive)  # what came before makes no event any more

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one message. Raises ZMQError where a router knows the receiver no more."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)
        # The descriptor tells of a change once, and sending may have taken note of what came meanwhile.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Stop receiving and close the socket; what waits to be sent is up to the socket's own options."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close()

    def _receive(self) -> None:
        self._scheduled = False
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_frames(frames)
            except Exception:  # the socket serves others as well
                _log.warning("dropped a message that cannot be understood", exc_info=True)
