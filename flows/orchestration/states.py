"""How a run ends: the event in its store and the state in Prefect; cancellation between two stages."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from flows import PACKAGES
from flows.orchestration.server import cancelled, current_flow_run, is_termination
from storage.errors import StoreError
from storage.store import open_store
from tasks.runtime.prefect_task import error_text

ASK_SECONDS = 2.0


class EmptyBatch(ValueError):
    """Every batch of a step was empty: the filters left nothing to train on."""


class GateRefused(ValueError):
    """A step's batch may not be trained on: a person or a rule said so."""


class RunCancelled(ValueError):
    """Someone asked Prefect to cancel the run."""


class Cancellation:
    """Asks now and then whether a run was cancelled; threads of the run may share one."""

    def __init__(self, ask: Callable[[Any], bool] = cancelled, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._quiet_until = clock()
        self._cancelled = False

    def asked_for(self, flow_run: str | None) -> bool:
        """Tell whether the flow run was cancelled, as far as is known; False outside a flow run."""
        with self._lock:
            if flow_run and not self._cancelled and self._clock() >= self._quiet_until:
                self._cancelled = self._ask(flow_run)
                self._quiet_until = self._clock() + ASK_SECONDS
            return self._cancelled


OPEN = ("started", "resumed")
"""Events after which a run is at work, or its process died without a word."""
P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("stagecoach")


def event_of(error: BaseException) -> tuple[str, str]:
    """Return the event that an error makes of a run, and its message."""
    if isinstance(error, EmptyBatch):
        return "evicted", str(error)
    if isinstance(error, GateRefused):
        return "refused", str(error)
    if isinstance(error, RunCancelled):
        return "cancelled", str(error)
    # A busy server may not answer once; without its answer a cancelled run would be called failed, for good.
    if is_termination(error) and cancelled(current_flow_run(), attempts=5):
        return (
            "cancelled",
            "cancelled in Prefect. Everything done so far is safe; the same run again goes on",
        )
    return "failed", error_text(error)


def reports_its_end(flow_function: Callable[P, R]) -> Callable[P, R]:
    """Let a flow end in a state of Prefect that says everything; whoever calls the flow gets the error itself.

    The border at which any exception becomes a state. Errors that only a traceback explains are logged with one.
    """

    @wraps(flow_function)
    def ending(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return flow_function(*args, **kwargs)
        except RunCancelled as error:
            from prefect.states import Cancelled

            return Cancelled(message=str(error), data=error)
        except Exception as error:
            from prefect.states import Failed

            _say(error)
            return Failed(message=error_text(error), data=error)

    return ending


def _say(error: Exception) -> None:
    """Write an error into the flow run's logs, in lines: a state's message is on one line there."""
    from prefect.logging import get_run_logger

    log = get_run_logger() if current_flow_run() else _log
    ours = type(error).__module__.partition(".")[0] in PACKAGES
    log.error(error_text(error), exc_info=None if ours else error)


def note_end(flow: Any, flow_run: Any, state: Any) -> None:
    """Write into the store that a run's process was killed: a hook for Prefect's crashed and cancelled states.

    Called in the worker, where nothing of the run is left but its tags. A run that wrote down its own end, or that
    another flow run has taken up since, stays as it is. Prefect passes the arguments by these names.
    """
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        tags = client.read_flow_run(flow_run.id).tags  # as they are now: the run's own process has set them
    run, store = tagged(tags, "run"), tagged(tags, "store")
    if not run or not store:
        return  # it ended before it had a run
    try:
        runs = open_store(store).runs
        last = runs.events(run)[-1] if run in runs.names() else None
        if last is not None and last.event in OPEN and last.flow_run == str(flow_run.id):
            event = "cancelled" if state.is_cancelled() or state.is_cancelling() else "crashed"
            how = (state.message or "its process is gone").rstrip(".")
            told = f"{how}. What is committed is safe; the same run again goes on from there"
            runs.record(run=run, event=event, message=told, flow_run=last.flow_run, host=last.host, pid=last.pid)
    except StoreError as error:
        _log.warning("the end of run %s could not be written into its store: %s", run, error)


def tagged(tags: Iterable[str], name: str) -> str:
    """Return what a tag `name:value` says; empty without one."""
    return next((tag.partition(":")[2] for tag in tags if tag.startswith(f"{name}:")), "")


OF_A_RUN: dict[str, Any] = {
    "persist_result": False,  # the ledger remembers
    "validate_parameters": False,  # the config checks them, and says in its own words what is wrong
    "on_crashed": [note_end],
    "on_cancellation": [note_end],
}
"""What every flow that makes a run tells Prefect."""
