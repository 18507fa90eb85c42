"""Reports the learner's progress from a second thread, so that a slow step can be status from one that hangs. No torch.

A learner that trains answers no other request until the step is over. So it has a second address, at which this thread
reports at once which request is running and for how long it has made no progress. Each packed row, each optimizer step
and each part of saving is a beat: a long step keeps beating, and one that hangs, in a kernel or waiting for another
rank, does not. A process that was suspended for an hour does not hang: of a time in which it did not run at all, at
most LONGEST_TICK counts. A process that gets a little of each second does run, and its seconds count in full.
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

from tasks.learner import protocol

TICK_SECONDS = 1.0
"""How often the thread counts time while no question arrives."""
LONGEST_TICK = 2.0
"""Most that counts between two readings of the clock: where more has passed, the process was suspended."""
ANSWER_SECONDS = 5.0
"""Longest wait for a caller to take an answer."""
RETRY_SECONDS = 10.0
"""Longest wait for an answer to the second question."""
LONGEST_ANSWER = 4096
"""Bytes read at once."""


class Pulse:
    """Counts how long a request has made no progress. The working thread beats; any thread may ask for the status."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_tick = clock()
        self._running_seconds = 0.0
        self._last_beat = 0.0
        self._request = ""

    @contextmanager
    def track(self, request: str) -> Iterator[None]:
        """Name the request that runs within the block; outside of it nothing can hang."""
        self.beat()
        self._request = request
        try:
            yield
        finally:
            self._request = ""

    def beat(self) -> None:
        """Record progress; costs next to nothing."""
        # Without a lock: both are single numbers, and the working thread must never wait for this one.
        self._last_beat = self._running_seconds

    def tick(self) -> None:
        """Count the time since the last tick."""
        now = self._clock()
        self._running_seconds += min(now - self._last_tick, LONGEST_TICK)
        self._last_tick = now

    def status(self) -> dict[str, Any]:
        """Return the running request, empty for none, and for how many seconds it has made no progress."""
        # Read once: the working thread may end the request at any moment.
        request = self._request
        return {"request": request, "still_seconds": self._running_seconds - self._last_beat if request else 0.0}

    def serve(self, listener: socket.socket, key: str = "") -> None:
        """Answer every connection of who has the key with the status, in a thread that ends with the process."""
        threading.Thread(target=self._serve, args=(listener, key), name="pulse", daemon=True).start()

    def _serve(self, listener: socket.socket, key: str) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while True:
                ready = selector.select(TICK_SECONDS)
                self.tick()
                if ready:
                    with suppress(OSError):  # the caller is gone; the next one is answered
                        connection, _ = listener.accept()
                        # Each in a thread: one that says nothing must not keep the others waiting, nor the clock.
                        threading.Thread(target=self._answer, args=(connection, key), daemon=True).start()

    def _answer(self, connection: socket.socket, key: str) -> None:
        with connection, suppress(OSError, EOFError, ValueError):
            connection.settimeout(ANSWER_SECONDS)
            protocol.admit(connection, key)
            connection.sendall(json.dumps(self.status()).encode())


def ask(address: str, seconds: float, key: str = "") -> dict[str, Any]:
    """Return the status of the learner with the second address `address`, see `Pulse.status`.

    Raises TimeoutError where it does not answer in `seconds`, another OSError where no process listens, or one that has
    another key, ValueError where another program has the address by now.
    """
    host, _, port = address.rpartition(":")
    deadline, answer = time.monotonic() + seconds, b""
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        protocol.introduce(connection, key)
        while part := connection.recv(LONGEST_ANSWER):
            answer += part
            # A timeout of zero would mean not to wait at all.
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
    if not answer:
        raise ConnectionResetError(f"the learner at {address} closed the connection without a word")
    return dict(json.loads(answer))


def hangs(address: str, seconds: float, key: str = "") -> bool:
    """Tell whether the learner leaves a question unanswered, or its request makes no progress, for `seconds`.

    An unanswered question is repeated once: the caller itself may have been suspended meanwhile. Where no process
    listens, or it cannot be reached, it does not hang: its end is noticed by the supervisor of the process.
    """
    log = logging.getLogger(__name__)
    try:
        try:
            status = ask(address, seconds, key)
        except TimeoutError:
            status = ask(address, min(seconds, RETRY_SECONDS), key)
    except TimeoutError:
        log.warning("the learner at %s has not answered for %g s (learner.hang_seconds)", address, seconds)
        return True
    except (OSError, ValueError) as error:
        log.debug("cannot tell whether the learner at %s hangs: %s", address, error)
        return False
    still, request = float(status["still_seconds"]), status["request"]
    if still > seconds:
        log.warning("the learner at %s: no progress with %r for %g s (learner.hang_seconds)", address, request, still)
    return still > seconds
