"""Entry point of the learner's process: `python -m tasks.learner.worker --report PATH`, or the same under torchrun.

Rank 0 listens on two free ports, of 127.0.0.1 unless it serves a run of another machine, and writes {"address": ...,
"pulse": ..., "pid": ...} to PATH once it can answer: requests at the first, questions about its progress at the second
(tasks.learner.pulse). The process ends on SIGTERM, and when its standard input is a pipe that closes.
"""

import argparse
import json
import os
import selectors
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.errors import StoreError
from tasks.learner import protocol
from tasks.learner.protocol import LearnerError
from tasks.learner.pulse import Pulse
from tasks.runtime.process_variables import bind_address
from tasks.runtime.torchvision_operators import declare_torchvision_operators

if TYPE_CHECKING:  # both import torch, which `main` does later and in its own way
    from tasks.learner.distributed import World
    from tasks.learner.trainer import Trainer

STALL_SECONDS = 60.0
"""Longest wait for the rest of a message: a client that stalls must not block the others for ever."""
ADMIT_SECONDS = 10.0
"""Longest wait for the proof of a client that it has the learner's key."""


class Service:
    """Serves any number of connections, one request at a time.

    Rank 0 answers requests and broadcasts each, so that all ranks do the same.
    """

    def __init__(self, trainer: "Trainer", world: "World", pulse: Pulse) -> None:
        self._trainer, self._world, self._pulse = trainer, world, pulse

    def serve(self, listener: socket.socket, key: str = "") -> None:
        """Answer requests of those who have the key, if there is one, until the process ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while True:
                for ready, _ in selector.select():
                    if ready.fileobj is listener:
                        connection, _ = listener.accept()
                        # In a thread: who has no key, and says nothing, must not keep the others waiting.
                        threading.Thread(target=_admit, args=(connection, selector, key), daemon=True).start()
                    else:
                        assert isinstance(ready.fileobj, socket.socket)
                        self._serve_one(ready.fileobj, selector)

    def follow(self) -> None:
        """On the other ranks: execute what rank 0 broadcasts, until the process ends.

        A failure on this rank alone ends its process, and so all ranks.
        """
        while True:
            header = self._world.broadcast(None)
            try:
                self._execute(header)
            except (LearnerError, StoreError):
                # Rank 0 raises the same refusal and answers it.
                continue

    def _serve_one(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            header = protocol.receive(connection)
        except (EOFError, OSError, ValueError):
            # Closed, stalled, or no client of the learner.
            _drop(connection, selector)
            return
        with self._pulse.track(str(header.get("request"))):
            answer = self._answer(header, connection)
        try:
            protocol.send(connection, answer)
        except OSError:
            _drop(connection, selector)

    def _answer(self, header: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        try:
            self._world.broadcast(header)
            return self._execute(header, connection)
        except (LearnerError, StoreError) as error:
            return protocol.error_answer(error)
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
            return protocol.error_answer(LearnerError(message))

    def _execute(self, header: dict[str, Any], connection: socket.socket | None = None) -> dict[str, Any]:
        arguments = header["arguments"]
        match header["request"]:
            case "configure":
                self._trainer.configure(**arguments)
            case "load":
                self._trainer.load(**arguments)
            case "train":
                return {"result": self._trainer.train(**arguments)}
            case "send_weights":
                self._trainer.send_weights(partial(_call_route, connection), **arguments)
            case "release":
                self._trainer.release()
            case "probe":
                return {"result": self._trainer.probe(**arguments)}
            case "state":
                return {"result": self._trainer.state()}
            case unknown:
                known = ["configure", "load", "probe", "release", "send_weights", "state", "train"]
                raise LearnerError(f"unknown request {unknown!r}; known are {known}")
        return {"result": None}


def _admit(connection: socket.socket, selector: selectors.BaseSelector, key: str) -> None:
    connection.settimeout(ADMIT_SECONDS)
    try:
        protocol.admit(connection, key)
    except (EOFError, OSError, ValueError):
        connection.close()
    else:
        connection.settimeout(STALL_SECONDS)
        selector.register(connection, selectors.EVENT_READ)  # the kernel's list takes it while it is waited for


def _call_route(connection: socket.socket | None, route: str, content: Mapping[str, Any]) -> None:
    """Have the client call a route of an engine's server; raises EOFError or OSError where it went away instead."""
    assert connection, "rank 0 has it"
    connection.settimeout(None)  # weights may take long
    protocol.send(connection, {"call": [route, content]})
    protocol.receive(connection)
    connection.settimeout(STALL_SECONDS)


def _drop(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    selector.unregister(connection)
    connection.close()


def import_learner() -> None:
    """Import torch, transformers and the trainer, which takes seconds; `doctor` calls this as well."""
    declare_torchvision_operators()
    import transformers.masking_utils
    import transformers.modeling_utils  # noqa: F401  # now, while an engine starts, and not with the first policy

    from storage.read import groups  # noqa: F401
    from tasks.learner import trainer  # noqa: F401


def main() -> None:
    """Start the ranks, report the address, serve until the end of the process."""
    parser = argparse.ArgumentParser(description="The learner's process.")
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    watch_parent()
    # Read by OpenMP when torch loads it, so before the imports below: spinning threads burn the cores of others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import_learner()
    import transformers

    from tasks.learner.distributed import start_world
    from tasks.learner.trainer import Trainer

    world = start_world()
    # Progress bars are for terminals; this output goes to a log file.
    transformers.utils.logging.disable_progress_bar()
    pulse = Pulse()
    service = Service(Trainer(world, pulse.beat), world, pulse)
    if world.rank > 0:
        service.follow()
    free, key = (bind_address(), 0), os.environ.get(protocol.KEY_VARIABLE, "")
    with socket.create_server(free) as listener, socket.create_server(free) as pulse_listener:
        pulse.serve(pulse_listener, key)
        report(arguments.report, {"address": _address(listener), "pulse": _address(pulse_listener), "pid": os.getpid()})
        service.serve(listener, key)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def watch_parent() -> None:
    """End the process when standard input closes, if it is a pipe or socket; a terminal or /dev/null says nothing."""
    mode = os.fstat(0).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        threading.Thread(target=_end_with_input, daemon=True).start()


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    # Not sys.exit: the main thread may be deep in a matrix product, and nothing here needs cleaning up.
    os._exit(0)


def report(path: Path, content: dict[str, object]) -> None:
    """Write `content` as JSON to `path` so that a reader sees all of it or nothing."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(content))
    draft.rename(path)


if __name__ == "__main__":
    main()
