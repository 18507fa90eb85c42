"""Serves the learner's requests: rank 0 answers them and broadcasts each, so that all ranks do the same."""

import selectors
import socket
import sys
import traceback
from typing import Any

import pyarrow as pa

from tasks.learner import wire
from tasks.learner.distributed import World
from tasks.learner.errors import BY_NAME, LearnerError
from tasks.learner.pulse import Pulse
from tasks.learner.trainer import Trainer

STALL_SECONDS = 60.0
"""Longest wait for the rest of a message: a client that stalls must not block the others for ever."""

Answer = tuple[dict[str, Any], pa.Table | None]


class Service:
    """Serves any number of connections, one request at a time."""

    def __init__(self, trainer: Trainer, world: World, pulse: Pulse) -> None:
        self._trainer, self._world, self._pulse = trainer, world, pulse

    def serve(self, listener: socket.socket) -> None:
        """Answer requests until the process ends."""
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
                        self._serve_one(ready.fileobj, selector)

    def follow(self) -> None:
        """On the other ranks: execute what rank 0 broadcasts, until the process ends.

        A failure on this rank alone ends its process, and so all ranks.
        """
        while True:
            header, table = self._world.broadcast(None)
            try:
                self._execute(header, table)
            except LearnerError:
                # Rank 0 raises the same refusal and answers it.
                continue

    def _serve_one(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            header, table = wire.receive(connection)
        except (EOFError, OSError, ValueError):
            # Closed, stalled, or no client of the learner.
            _drop(connection, selector)
            return
        with self._pulse.track(str(header.get("request"))):
            answer, answer_table = self._answer(header, table)
        try:
            wire.send(connection, answer, answer_table)
        except OSError:
            _drop(connection, selector)

    def _answer(self, header: dict[str, Any], table: pa.Table | None) -> Answer:
        try:
            self._world.broadcast((header, table))
            return self._execute(header, table)
        except LearnerError as error:
            name = type(error).__name__ if type(error).__name__ in BY_NAME else LearnerError.__name__
            return {"error": name, "message": str(error)}, None
        except Exception as error:
            # The boundary of the process: an unforeseen error goes to the log in full and to the client in one line.
            traceback.print_exc(file=sys.stderr)
            if self._world.size > 1:
                # The other ranks may be waiting in any collective: only a restart synchronises them again.
                raise SystemExit(1) from error
            self._trainer.forget()
            message = (
                f"the learner failed at {header.get('request')!r} ({type(error).__name__}: {error}); its log has the "
                "traceback. It holds no policy now: load one"
            )
            return {"error": LearnerError.__name__, "message": message}, None

    def _execute(self, header: dict[str, Any], table: pa.Table | None) -> Answer:
        arguments = header["arguments"]
        match header["request"]:
            case "configure":
                self._trainer.configure(**arguments)
                return {"result": None}, None
            case "load":
                self._trainer.load(**arguments)
                return {"result": None}, None
            case "train":
                assert table is not None, "the client sends the packed rows"
                updates, statistics = self._trainer.train(table, **arguments)
                return {"result": updates}, statistics
            case "probe":
                return {"result": {"logprobs": self._trainer.probe(**arguments)}}, None
            case "state":
                return {"result": self._trainer.state()}, None
            case unknown:
                known = ["configure", "load", "probe", "state", "train"]
                raise LearnerError(f"unknown request {unknown!r}; known are {known}")


def _drop(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    selector.unregister(connection)
    connection.close()
