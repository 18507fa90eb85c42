"""Answers requests on rank 0, passes each on to the other ranks, and keeps them in step."""

import selectors
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from tasks.learner import wire
from tasks.learner.distributed import World
from tasks.learner.errors import BY_NAME, LearnerError
from tasks.learner.pulse import Pulse
from tasks.learner.trainer import Trainer

# A client that stalls in the middle of a message must not hold up the others for ever.
STALL_SECONDS = 60.0

Answer = tuple[dict[str, Any], pa.Table | None]


class Service:
    """Serves any number of connections, one request at a time."""

    def __init__(self, trainer: Trainer, world: World, pulse: Pulse) -> None:
        self._trainer, self._world, self._pulse = trainer, world, pulse
        self._requests: dict[str, Callable[..., Any]] = {
            "configure": trainer.configure,
            "load": trainer.load,
            "train": trainer.train,
            "probe": lambda **arguments: {"logprobs": trainer.probe(**arguments)},
            "state": trainer.state,
        }

    def serve(self, listener: socket.socket) -> None:
        """Answer requests for ever; only the end of the process ends it."""
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while True:
                for ready, _ in selector.select():
                    if ready.fileobj is listener:
                        connection, _ = listener.accept()
                        connection.settimeout(STALL_SECONDS)
                        selector.register(connection, selectors.EVENT_READ)
                    else:
                        assert isinstance(ready.fileobj, socket.socket)
                        self._one(ready.fileobj, selector)

    def follow(self) -> None:
        """On the other ranks: do what rank 0 does, for ever. A failure only here ends the process and so all ranks."""
        while True:
            header, table = self._world.broadcast(None)
            try:
                self._call(header, table)
            except LearnerError:
                # Rank 0 meets the same refusal and answers it.
                continue

    def _one(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            header, table = wire.receive(connection)
        except (EOFError, OSError, ValueError):
            # Closed, stalled, or not one of our clients.
            _drop(connection, selector)
            return
        with self._pulse.during(str(header.get("request"))):
            answer, answer_table = self._answer(header, table)
        try:
            wire.send(connection, answer, answer_table)
        except OSError:
            _drop(connection, selector)

    def _answer(self, header: dict[str, Any], table: pa.Table | None) -> Answer:
        try:
            self._world.broadcast((header, table))
            return self._call(header, table)
        except LearnerError as error:
            name = type(error).__name__ if type(error).__name__ in BY_NAME else LearnerError.__name__
            return {"error": name, "message": str(error)}, None
        except Exception as error:
            # The border of the process: what nobody foresaw goes to the log in full and to the client in one line.
            traceback.print_exc(file=sys.stderr)
            if self._world.size > 1:
                # The other ranks may be anywhere: only a restart brings them back in step.
                raise SystemExit(1) from error
            self._trainer.forget()
            message = (
                f"the learner failed at {header.get('request')!r} ({type(error).__name__}: {error}); its log has the "
                "traceback. It holds no policy now: load one"
            )
            return {"error": LearnerError.__name__, "message": message}, None

    def _call(self, header: dict[str, Any], table: pa.Table | None) -> Answer:
        request = self._requests.get(header["request"])
        if request is None:
            raise LearnerError(f"unknown request {header['request']!r}; known are {sorted(self._requests)}")
        if header["request"] != "train":
            return {"result": request(**header["arguments"])}, None
        result, statistics = request(table, **header["arguments"])
        return {"result": result}, statistics


def _drop(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    selector.unregister(connection)
    connection.close()
