"""How many rollouts are under way, and how long the learner has nothing to train on."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SUMS = ("in_flight", "idle_seconds", "learner_waited_seconds", "num_ended", "num_cancelled")
"""What is added up from one reading to the next, by the columns of table intake_loads; `in_flight` in seconds."""


class LoadMeter:
    """Adds up rollouts and waits, in any thread, until they are read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._rollouts = self._waiting = 0
        self._since = self._at = clock()
        self._sums: dict[str, float] = dict.fromkeys(SUMS, 0)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Count a rollout as under way within the block, and as cancelled where that raises."""
        self._add(rollouts=1)
        end = "num_cancelled"
        try:
            yield
            end = "num_ended"
        finally:
            self._add(rollouts=-1, end=end)

    @contextmanager
    def learner_waits(self) -> Iterator[None]:
        """Count the learner as waiting for rollouts within the block."""
        self._add(waiting=1)
        try:
            yield
        finally:
            self._add(waiting=-1)

    def read(self) -> dict[str, float]:
        """Return the columns of intake_loads that were measured since the last reading, and begin anew.

        `in_flight` is the mean of `seconds`, the time between the readings; the number at the end where that is none.
        """
        with self._lock:
            self._advance()
            load, seconds = self._sums, self._at - self._since
            self._since = self._at
            self._sums = dict.fromkeys(SUMS, 0)
            return load | {"seconds": seconds, "in_flight": load["in_flight"] / seconds if seconds else self._rollouts}

    def _add(self, rollouts: int = 0, waiting: int = 0, end: str = "") -> None:
        with self._lock:
            self._advance()
            self._rollouts += rollouts
            self._waiting += waiting
            if end:
                self._sums[end] += 1

    def _advance(self) -> None:
        now = self._clock()
        seconds, self._at = now - self._at, now
        self._sums["in_flight"] += seconds * self._rollouts
        self._sums["idle_seconds"] += 0.0 if self._rollouts else seconds
        self._sums["learner_waited_seconds"] += seconds if self._waiting else 0.0
