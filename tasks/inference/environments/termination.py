"""Ends an environment's process cleanly on SIGTERM, also where the signal strikes inside a callback.

Apart from `pool`, because the environment's process needs it before it imports verifiers.
"""

import os
import signal
import sys
import time
from _thread import start_new_thread
from typing import Any

RESEND_SECONDS = 0.1
"""Wait before a lost interrupt is sent again: by then the callback that lost it is over, or loses it once more."""


def cancel_on_sigterm() -> None:
    """Make the first SIGTERM act as an interrupt, which the event loop turns into a cancellation of its main task.

    Before the loop runs, the signal raises KeyboardInterrupt. Python prints and drops an exception that is raised in a
    callback of a weak reference, and imports run many of those: a dropped interrupt is sent again.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the only handler that asyncio replaces by a cancellation
    signal.signal(signal.SIGTERM, _interrupt)
    before = sys.unraisablehook

    def resend_if_lost(dropped: "sys.UnraisableHookArgs") -> None:
        before(dropped)
        if isinstance(dropped.exc_value, KeyboardInterrupt):
            # Not by `threading`: the interrupted code may hold one of its locks.
            start_new_thread(_resend_interrupt, ())

    sys.unraisablehook = resend_if_lost


def _interrupt(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `pool` reads this as "told to end"
    signal.raise_signal(signal.SIGINT)


def _resend_interrupt() -> None:
    time.sleep(RESEND_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)
