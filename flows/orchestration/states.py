"""States of a run: it is cancelled between two stages, and ends."""

import logging
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from flows.orchestration.server import api_client, cancellation, current_flow_run, tag_value
from flows.orchestration.signals import ending_signal, is_end, is_termination
from flows.reporting.bookkeeping import Bookkeeper
from flows.services.ownership import live_processes, writer_alive
from storage.errors import StoreError
from storage.records import STARTS, Event, Runs
from storage.store import Store, open_store
from tasks.runtime.prefect_task import error_text

ASK_SECONDS = 2.0


class EmptyBatch(ValueError):
    """Every batch of a step was empty: the filters left nothing to train on."""


class GateRefused(ValueError):
    """A step's batch may not be trained on: a person or a rule said so."""


class RunCancelled(ValueError):
    """Someone asked Prefect to cancel the run."""


EVENTS_OF = {EmptyBatch: "evicted", GateRefused: "refused", RunCancelled: "cancelled"}


class Cancellation:
    """Asks now and then whether a run was cancelled; threads of the run may share one."""

    def __init__(
        self,
        ask: Callable[[Any], str | None] = cancellation,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`tell` is called when Prefect does not answer, and when it does again."""
        self._ask = ask
        self._clock = clock
        self._keeper = Bookkeeper(tell)
        self._lock = threading.Lock()
        self._quiet_until = clock()
        self._cancelled = ""

    def asked_for(self, flow_run: str | None) -> str:
        """Return a text where the flow run was cancelled, as far as is known; empty outside a flow run."""
        with self._lock:
            if flow_run and not self._cancelled and self._clock() >= self._quiet_until:
                # Under the lock: one of the threads asks for all of them.
                self._keeper.call(partial(self._take_answer, flow_run))
                self._quiet_until = self._clock() + ASK_SECONDS
            return self._cancelled

    def _take_answer(self, flow_run: str) -> bool:
        """Ask; return whether there was an answer. One that comes too late for who asked is there for who asks next."""
        answer = self._ask(flow_run)
        self._cancelled = self._cancelled or answer or ""
        return answer is not None


SAFE = ". Everything done so far is safe; the same run again goes on"
_log = logging.getLogger("stagecoach")


def resume_command(run: str, store: str) -> str:
    """Return the command that goes on with a run."""
    return f"stagecoach resume {run} --store {shlex.quote(store)}"


def cancelled_text(when: str, run: str, store: str) -> str:
    """Return the message of a run that was cancelled: what is safe, and how it goes on."""
    return f"cancelled {when}. Everything done so far is safe in {store}; go on with: {resume_command(run, store)}"


def event_of(error: BaseException, run: str, store: str, where: str = "") -> tuple[str, str]:
    """Return the event that an error makes of a run, and its message; `where` is the work under way, if any."""
    for kind, event in EVENTS_OF.items():
        if isinstance(error, kind):
            return event, str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", f"interrupted from the keyboard{SAFE}"
    # Prefect's worker cancels by SIGTERM; without that request somebody else sent it. A busy server may not answer
    # once, and the run would be called interrupted for good.
    if is_termination(error) and cancellation(current_flow_run(), attempts=5):
        return "cancelled", cancelled_text(f"in Prefect{where and f' at {where}'}", run, store)
    if is_end(error):
        return "interrupted", f"ended by {ending_signal()}{SAFE}"
    return "failed", error_text(error)


def note_end(flow: Any, flow_run: Any, state: Any) -> None:
    """Write into the store that a run's process was killed: a hook for Prefect's crashed and cancelled states.

    Called in the worker, where nothing of the run is left but its tags. A run that wrote down its own end, or that
    another flow run has taken up since, stays as it is. Prefect passes the arguments by these names.
    """
    with api_client() as client:
        tags = client.read_flow_run(flow_run.id).tags  # as they are now: the run's own process has set them
    run, store = tag_value(tags, "run"), tag_value(tags, "store")
    if not run or not store:
        return  # it ended before it had a run
    try:
        runs = open_store(store).runs
        last = runs.last(run)
        if last is not None and last.event in STARTS and last.flow_run == str(flow_run.id):
            event = "cancelled" if state.is_cancelled() or state.is_cancelling() else "crashed"
            _record_end(runs, run, last, event, (state.message or "its process is gone").rstrip("."))
    except StoreError as error:
        _log.warning("the end of run %s could not be written into its store: %s", run, error)


def mark_crashed(store: Store) -> list[str]:
    """Write the event `crashed` for every run of this host whose process is gone; return their names."""
    marked = []
    for run in store.runs.names():
        # Only the last event tells: a run that was resumed has another process than before.
        last = store.runs.last(run)
        if last and last.event in STARTS and last.host == socket.gethostname() and not writer_alive(last):
            _record_end(store.runs, run, last, "crashed", f"process {last.pid} is gone")
            marked.append(run)
    return marked


def other_writers(store: Store, run: str) -> list[str]:
    """Return a text about each other process that is at work on a run, as far as can be seen from here."""
    events = store.runs.events(run) if store.runs.last(run) else []
    here = socket.gethostname(), os.getpid()
    others = [writer for writer in live_processes(events) if (writer.host, writer.pid) != here]
    return [
        f"run {run} is at work in another process too: {writer.pid} on {writer.host}"
        f"{'' if writer.host == here[0] else ', as far as can be seen from here'}, since {writer.at:%Y-%m-%d %H:%M:%S} "
        "UTC. Nothing is lost and nothing counts twice, but both may do the same work: end one of them"
        for writer in others
    ]


def _record_end(runs: Runs, run: str, last: Event, event: str, how: str) -> None:
    """Write down how a run ended whose process could not; it is said to be of the process that the last event names."""
    message = f"{how}. What is committed is safe; the same run again goes on from there"
    runs.record(run=run, event=event, message=message, flow_run=last.flow_run, host=last.host, pid=last.pid)
