"""Termination of an environment server: SIGTERM cancels what its event loop runs, wherever Python happens to be.

Verifiers raises KeyboardInterrupt from its handler. In a finalizer or a weak reference's callback, where a busy event
loop is now and then, Python prints such an exception and goes on: the signal is lost, and the process is killed only
when its parent has waited long enough, with none of its own cleaning up done.
"""

import os
import signal
import sys
import time
from _thread import start_new_thread
from typing import Any

AGAIN_SECONDS = 0.1
"""Until an interrupt that was lost is sent again: the callback that it was lost in is over then, or loses it anew."""


def end_when_told() -> None:
    """Take SIGTERM as the event loop takes an interrupt: it cancels its main task. Later ones change nothing.

    Before the loop runs, the signal raises KeyboardInterrupt, again where that was printed and lost: imports are full
    of weak references' callbacks.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what asyncio replaces by a cancellation; no other
    signal.signal(signal.SIGTERM, _interrupt)
    before = sys.unraisablehook

    def look(lost: "sys.UnraisableHookArgs") -> None:
        before(lost)
        if isinstance(lost.exc_value, KeyboardInterrupt):
            start_new_thread(_interrupt_again, ())  # not by `threading`: who is interrupted may hold one of its locks

    sys.unraisablehook = look


def _interrupt(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


def _interrupt_again() -> None:
    time.sleep(AGAIN_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)
