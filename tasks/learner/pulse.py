"""Whether the learner lives and gets on with its work, told by a thread beside the one that works; imports no torch.

A learner that trains answers no request for as long as a step takes. So it has a second address, at which this thread
says at once what is under way and for how long nothing of it has moved. Each row, each optimizer step and each part of
saving is a beat: a long step goes on beating, and one that is stuck, in a kernel or in waiting for another rank, does
not. A process that was stopped for an hour is not stuck: of a time in which it did not run at all only LONGEST_TICK
counts. One that gets a little of each second runs, and its seconds count in full.
"""

import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

TICK_SECONDS = 1.0
"""How often the thread counts time while nobody asks."""
LONGEST_TICK = 2.0
"""What counts at most between two looks at the clock: where more has passed, the process did not run."""
ANSWER_SECONDS = 5.0
"""Longest wait for a caller to take an answer."""
AGAIN_SECONDS = 10.0
"""Longest second wait for an answer."""
LONGEST_ANSWER = 4096


class Pulse:
    """Counts how long a request has made no progress. Beats come from the working thread, questions from any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen = clock()
        self._lived = 0.0
        self._beaten = 0.0
        self._request = ""

    @contextmanager
    def during(self, request: str) -> Iterator[None]:
        """Say what is under way within the block; without it nothing can be stuck."""
        self.beat()
        self._request = request
        try:
            yield
        finally:
            self._request = ""

    def beat(self) -> None:
        """Say that the work has moved on; costs next to nothing."""
        self._beaten = self._lived

    def tick(self) -> None:
        """Count the time since the last tick."""
        now = self._clock()
        self._lived += min(now - self._seen, LONGEST_TICK)
        self._seen = now

    def told(self) -> dict[str, Any]:
        """Return the request under way, empty for none, and for how many seconds it has stood still."""
        request = self._request
        return {"request": request, "still_seconds": self._lived - self._beaten if request else 0.0}

    def serve(self, listener: socket.socket) -> None:
        """Tell whoever connects, in a thread that ends with the process."""
        threading.Thread(target=self._serve, args=(listener,), name="pulse", daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while True:
                asked = selector.select(TICK_SECONDS)
                self.tick()
                if asked:
                    with suppress(OSError):  # who asked is gone; the next one is answered
                        self._answer(listener)

    def _answer(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(json.dumps(self.told()).encode())


def ask(address: str, seconds: float) -> dict[str, Any]:
    """Return what the learner tells at its second address, as `Pulse.told` does.

    Raises TimeoutError where it does not answer for so long, another OSError where nobody is there, ValueError where
    somebody else has the address by now and says something.
    """
    host, _, port = address.rpartition(":")
    deadline, said = time.monotonic() + seconds, b""
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        while part := connection.recv(LONGEST_ANSWER):
            said += part
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
    if not said:
        raise ConnectionResetError(f"the learner at {address} closed the connection without a word")
    return dict(json.loads(said))


def hangs(address: str, seconds: float) -> bool:
    """Tell whether the learner leaves a question unanswered for so long, or its request has stood still for so long.

    A question that was not answered is asked again, for a caller that did not run itself meanwhile. Where nobody is
    there, or it cannot be asked, it does not hang: whoever watches processes knows more.
    """
    log = logging.getLogger(__name__)
    try:
        told = _asked_twice(address, seconds)
    except (OSError, ValueError) as error:
        log.debug("cannot tell whether the learner at %s hangs: %s", address, error)
        return False
    if told is None:
        log.warning("the learner at %s has not answered for %g s (learner.hang_seconds)", address, seconds)
        return True
    still = told["still_seconds"]
    if still > seconds:
        request = told["request"]
        log.warning("the learner at %s: no progress with %r for %g s (learner.hang_seconds)", address, request, still)
    return bool(still > seconds)


def _asked_twice(address: str, seconds: float) -> dict[str, Any] | None:
    """Return what the learner tells; None where it answers neither the first nor the second time."""
    for wait in (seconds, min(seconds, AGAIN_SECONDS)):
        with suppress(TimeoutError):
            return ask(address, wait)
    return None
