"""Ctrl-C at any moment of a command: without a traceback, once in order, and at once where the order takes too long.

Read before all else of the command line, so it imports only what Python's own start has imported: `signal` and
`contextlib` would take 20 ms more, in which Ctrl-C is a traceback.
"""

import _signal
import os
import sys
import time
from _thread import start_new_thread

INTERRUPTED: int = 128 + _signal.SIGINT
PATIENCE_SECONDS = 5.0
"""So long after the first Ctrl-C another one ends the program at once; its services end by themselves then."""
AGAIN_SECONDS = 0.1


class EndedByInterrupts:
    """Within the block, let Ctrl-C end the program as the system does: there is nothing yet to be brought to an end."""

    def __enter__(self) -> None:
        # Another handler is whoever's who imports this.
        self._ours = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
        self._handle(_signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        self._handle(_signal.default_int_handler)

    def _handle(self, handler: object) -> None:
        try:
            if self._ours:
                _signal.signal(_signal.SIGINT, handler)
        except ValueError:  # a thread beside the main one may set none
            self._ours = False


class Interrupts:
    """What Ctrl-C does to a program from now on to its end; the first one is raised as KeyboardInterrupt."""

    def __init__(self) -> None:
        self._first: float | None = None

    def take_over(self) -> None:
        """Handle Ctrl-C until the process ends, unless it is to be ignored or somebody else handles it."""
        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, self._handle)
            self._before, sys.unraisablehook = sys.unraisablehook, self._look

    def end(self) -> None:
        """From here on nothing is raised: the interpreter ends, and what is raised then is only printed."""
        self._first = self._first or time.monotonic()

    def _handle(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            raise KeyboardInterrupt
        if now - self._first > PATIENCE_SECONDS:
            os._exit(INTERRUPTED)
        # Not by `print`, which may be what is interrupted.
        os.write(2, b"\nAlready ending; what is committed is safe.\n")

    def _look(self, lost: "sys.UnraisableHookArgs") -> None:
        """Send the signal again where what it raised was lost, as in the import of a module; say nothing of it."""
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            self._before(lost)
            return
        self._first = None
        start_new_thread(_send_again, ())


def _send_again() -> None:
    time.sleep(AGAIN_SECONDS)
    os.kill(os.getpid(), _signal.SIGINT)
