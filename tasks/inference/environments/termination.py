"""Ends an environment server cleanly on SIGTERM, wherever Python is at that moment."""

import os
import signal
import sys
import time
from _thread import start_new_thread
from typing import Any

RESEND_SECONDS = 0.1
"""Until an interrupt that was lost is sent again: the callback that it was lost in is over then, or loses it anew."""


def cancel_on_sigterm() -> None:
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
            start_new_thread(_resend_interrupt, ())  # not by `threading`: who is interrupted may hold one of its locks

    sys.unraisablehook = look


def _interrupt(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


def _resend_interrupt() -> None:
    time.sleep(RESEND_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)
