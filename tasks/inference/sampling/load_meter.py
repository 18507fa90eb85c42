"""Measures over time how full the engine is, and how long the learner has nothing to train on."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tasks.inference.engine.client import ServedModel
from tasks.inference.sampling.limits import INTERVAL_SECONDS, EngineLoad, read_load, total_load


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
    requests_running: float | None
    """Mean number of requests in the engine's batch; None where no engine reports its load."""
    requests_waiting: float | None
    """Mean number of requests in the engine's queue."""
    cache_use: float | None
    """Mean share of the engine's KV cache in use, from 0 to 1."""


class LoadMeter:
    """Adds up rollouts, waits and the engine's own reports, from whatever thread, until somebody reads it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._in_flight = self._waiting = 0
        self._at = self._since = clock()
        self._rollout_seconds = self._idle = self._waited = 0.0
        self._ended = self._cancelled = 0
        self._reports: list[EngineLoad] = []

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

    def report(self, load: EngineLoad) -> None:
        """Add a report of the engine about itself."""
        with self._lock:
            self._reports.append(load)

    def read(self) -> MeasuredLoad:
        """Return what was measured since the last reading, and begin anew."""
        with self._lock:
            self._advance()
            seconds, reports = self._at - self._since, self._reports
            load = MeasuredLoad(
                seconds,
                self._rollout_seconds / seconds if seconds > 0 else float(self._in_flight),
                self._idle,
                self._waited,
                self._ended,
                self._cancelled,
                _mean([each.running for each in reports]),
                _mean([each.waiting for each in reports]),
                _mean([each.cache_use for each in reports]),
            )
            self._since, self._reports = self._at, []
            self._rollout_seconds = self._idle = self._waited = 0.0
            self._ended = self._cancelled = 0
            return load

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


async def report_loads(meter: LoadMeter, replicas: Callable[[], Sequence[ServedModel]]) -> None:
    """Report the load of an engine, of all its `replicas` together, once a second until cancelled.

    Ends where it has no metrics.
    """
    while True:
        loads = list[EngineLoad]()
        for replica in replicas():
            with suppress(ConnectionError):  # who watches the services reports a lost engine
                load = await read_load(replica)
                if load is None:
                    return
                loads.append(load)
        if loads:
            meter.report(total_load(loads))
        await asyncio.sleep(INTERVAL_SECONDS)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
