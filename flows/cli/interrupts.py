"""Interrupts: the first Ctrl-C raises KeyboardInterrupt, and one some seconds later ends the process."""

import os
import signal
import time
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
PATIENCE_SECONDS = 5.0
"""Time after the first Ctrl-C from which another one ends the process; its services then end by themselves."""


class Interrupts:
    """The handler of Ctrl-C for one call of the program."""

    def __init__(self) -> None:
        self._first: float | None = None

    def install(self) -> None:
        """Handle Ctrl-C until the process ends. The handler of an embedding program, or an ignored signal, stays."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def end(self) -> None:
        """Raise nothing from now on: the interpreter ends, and would only print the exception."""
        self._first = self._first or time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - self._first > PATIENCE_SECONDS:
            os._exit(INTERRUPTED)
        os.write(2, b"\nAlready ending; what is committed is safe.\n")  # `print` may be what is interrupted
