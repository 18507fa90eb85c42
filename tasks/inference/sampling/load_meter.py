"""How many rollouts are under way, and how long the learner has nothing to train on."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredLoad:
    """What was measured from one reading to the next."""

    seconds: float
    """Seconds between the two readings."""
    in_flight: float
    """Mean number of rollouts under way in these seconds; the number at their end where there are none."""
    idle_seconds: float
    """Seconds in which no rollout was under way."""
    learner_waited_seconds: float
    """Seconds in which the learner waited for rollouts."""
    num_ended: int
    """Rollouts that came to an end, errors included."""
    num_cancelled: int
    """Rollouts that were stopped before: with a group that was dropped, or a service that was lost."""


class LoadMeter:
    """Adds up rollouts and waits, in any thread, until they are read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._in_flight = self._waiting = 0
        self._at = clock()
        self._reset()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Count a rollout as under way within the block."""
        self._add(rollouts=1)
        ended = False
        try:
            yield
            ended = True
        finally:
            self._add(rollouts=-1, ended=ended, cancelled=not ended)

    @contextmanager
    def learner_waits(self) -> Iterator[None]:
        """Count the learner as waiting for rollouts within the block."""
        self._add(waiting=1)
        try:
            yield
        finally:
            self._add(waiting=-1)

    def read(self) -> MeasuredLoad:
        """Return what was measured since the last reading, and begin anew."""
        with self._lock:
            self._advance()
            seconds = self._at - self._since
            load = MeasuredLoad(
                seconds,
                self._rollout_seconds / seconds if seconds > 0 else float(self._in_flight),
                self._idle,
                self._waited,
                self._ended,
                self._cancelled,
            )
            self._reset()
            return load

    def _reset(self) -> None:
        self._since = self._at
        self._rollout_seconds = self._idle = self._waited = 0.0
        self._ended = self._cancelled = 0

    def _add(self, rollouts: int = 0, waiting: int = 0, ended: int = 0, cancelled: int = 0) -> None:
        with self._lock:
            self._advance()
            self._in_flight += rollouts
            self._waiting += waiting
            self._ended += ended
            self._cancelled += cancelled

    def _advance(self) -> None:
        now = self._clock()
        seconds, self._at = now - self._at, now
        self._rollout_seconds += seconds * self._in_flight
        self._idle += 0.0 if self._in_flight else seconds
        self._waited += seconds if self._waiting else 0.0
