"""Termination of an environment server: SIGTERM cancels what its event loop runs, wherever Python happens to be.

Verifiers raises KeyboardInterrupt from its handler. In a finalizer or a weak reference's callback, where a busy event
loop is now and then, Python prints such an exception and goes on: the signal is lost, and the process is killed only
when its parent has waited long enough, with none of its own cleaning up done.
"""

import signal
from typing import Any


def end_when_told() -> None:
    """Take SIGTERM as the event loop takes an interrupt: it cancels its main task. Later ones change nothing.

    Before the loop runs, the signal raises KeyboardInterrupt.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what asyncio replaces by a cancellation; no other
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)
