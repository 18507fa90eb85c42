"""SIGTERM that was printed and lost: it is sent again, until it ends what it was for.

Prefect's handler raises TerminationSignal wherever the main thread happens to be. In a finalizer or a weak reference's
callback Python prints such an exception ("Exception ignored in") and goes on, as if nobody had sent a signal.
"""

import os
import signal
import sys
import time
from _thread import start_new_thread
from collections.abc import Iterator
from contextlib import contextmanager

from flows.orchestration.prefect_api import TERMINATED, is_termination

AGAIN_SECONDS = 0.1
"""Until a lost signal is sent again: the callback that it was lost in is over then; if not, it is lost once more."""


@contextmanager
def lost_terminations_repeated() -> Iterator[None]:
    """Within the block, send this process SIGTERM again whenever what its handler raised was printed and lost.

    Prefect's own handler stays where it is: Prefect's worker cancels a run in order only while it is that one.
    """
    before = sys.unraisablehook
    within = True

    def look(lost: "sys.UnraisableHookArgs") -> None:
        before(lost)
        if within and _ends(lost.exc_value):
            start_new_thread(_send_again, ())  # not by `threading`: one of its locks may be held by who is interrupted

    sys.unraisablehook = look
    try:
        yield
    finally:
        within = False
        if sys.unraisablehook is look:  # not the one of another run of this process, which began later
            sys.unraisablehook = before


def _ends(lost: BaseException | None) -> bool:
    return is_termination(lost) or (isinstance(lost, SystemExit) and lost.code == TERMINATED)


def _send_again() -> None:
    time.sleep(AGAIN_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
