"""What a run sets up in its process: lost SIGTERMs sent again, dead runs marked as crashed, Prefect's log in a file."""

import logging
import os
import signal
import socket
import sys
import time
from _thread import start_new_thread
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.orchestration.server import TERMINATED, is_termination
from flows.orchestration.states import OPEN
from flows.services.ownership import was_alive
from storage.store import Store

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


def mark_crashed(store: Store) -> list[str]:
    """Write the event `crashed` for every run of this host whose process is gone; return their names."""
    marked = []
    for run in store.runs.names():
        last = store.runs.events(run)[-1]
        if last.event in OPEN and last.host == socket.gethostname() and not was_alive(last.pid, last.at):
            told = f"process {last.pid} is gone. Everything committed is safe; the same run again goes on from there"
            store.runs.record(
                run=run, event="crashed", message=told, flow_run=last.flow_run, host=last.host, pid=last.pid
            )
            marked.append(run)
    return marked


FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def route_prefect_logs(log: Path) -> None:
    """Send what Prefect would print to a file instead; what it sends to its API stays as it is.

    Must be called after Prefect was imported and before a flow is called.
    """
    from prefect.logging.configuration import setup_logging
    from prefect.logging.handlers import PrefectConsoleHandler

    setup_logging()
    log.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(log, encoding="utf-8", delay=True)
    file.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger("stagecoach").setLevel(logging.INFO)  # how sampling went, say; the root keeps to warnings
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    for logger in [logging.root, *loggers]:
        consoles = [handler for handler in logger.handlers if isinstance(handler, PrefectConsoleHandler)]
        for handler in consoles:
            logger.removeHandler(handler)
        if consoles:
            logger.addHandler(file)
