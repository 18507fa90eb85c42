"""Cancellation: a run that someone cancels in Prefect ends between two stages, with everything done so far kept.

Prefect ends no run that it did not start itself: it only notes the wish, so the run has to ask.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from flows.orchestration.prefect_api import cancelled

ASK_SECONDS = 2.0


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
