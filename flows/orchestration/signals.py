"""Signals that end a run in order: SIGTERM, SIGHUP of a closed terminal, and a SIGTERM that Python loses.

Imports no Prefect: handlers are set in the main thread before Prefect starts, and end the process after it.
"""

import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

TERMINATED = 128 + signal.SIGTERM
AGAIN_SECONDS = 0.1
"""Until a lost signal is sent again: the callback that it was lost in is over then; if not, it is lost once more."""
_ended_by = "SIGTERM"


@contextmanager
def termination_reported() -> Iterator[None]:
    """Within the block, SIGTERM ends the process in order, with status 143; a flow called here is reported as crashed.

    SIGHUP, of a terminal that is closed, does the same, unless the process ignores it as below `nohup`.

    Prefect hands the signal on to the handler that was there before, before it reports the crash: with the default
    handler the process would be dead by then. Does nothing outside the main thread.
    """
    # Python sets signal handlers in the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, before_hangup = signal.signal(signal.SIGTERM, _terminate), signal.getsignal(signal.SIGHUP)
    if before_hangup is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, partial(_hang_up, [output for output in (1, 2) if os.isatty(output)]))
    try:
        yield
    except BaseException as end:
        if is_termination(end):
            raise SystemExit(TERMINATED) from end
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, before_hangup)


def _hang_up(terminals: Sequence[int], *_: object) -> None:
    """End as at SIGTERM; what is still printed to a terminal that is gone must not fail."""
    global _ended_by
    _ended_by = "SIGHUP, which a closed terminal sends"
    with open(os.devnull, "wb") as nowhere:
        for descriptor in terminals:
            if not os.isatty(descriptor):
                os.dup2(nowhere.fileno(), descriptor)
    os.kill(os.getpid(), signal.SIGTERM)


def ending_signal() -> str:
    """Return the name of the signal that ends this process, where one does: SIGTERM, or SIGHUP passed on as such."""
    return _ended_by


def _terminate(*_: object) -> None:
    """End the process in order, unless this is Prefect that hands the signal on while it sees to the flow's end."""
    if not is_termination(sys.exc_info()[1]):
        raise SystemExit(TERMINATED)


def is_termination(error: BaseException | None) -> bool:
    """Return whether this is what Prefect raises in a flow at SIGTERM; by name, for it may not be imported."""
    return type(error).__name__ == "TerminationSignal"


def is_end(error: BaseException | None) -> bool:
    """Return whether this is what SIGTERM raises, in a flow or outside of one."""
    return is_termination(error) or (isinstance(error, SystemExit) and error.code == TERMINATED)


@contextmanager
def lost_terminations_repeated() -> Iterator[None]:
    """Within the block, send this process SIGTERM again whenever what its handler raised was printed and lost.

    Prefect's own handler stays where it is: Prefect's worker cancels a run in order only while it is that one.
    """
    before = sys.unraisablehook
    within = True

    def look(lost: "sys.UnraisableHookArgs") -> None:
        before(lost)
        if within and is_end(lost.exc_value):
            start_new_thread(_send_again, ())  # not by `threading`: the interrupted code may hold one of its locks

    sys.unraisablehook = look
    try:
        yield
    finally:
        within = False
        if sys.unraisablehook is look:  # not the one of another run of this process, which began later
            sys.unraisablehook = before


def _send_again() -> None:
    time.sleep(AGAIN_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
