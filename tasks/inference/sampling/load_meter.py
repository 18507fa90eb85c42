"""The load of engines, read once a second, and how long the learner has nothing to train on."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tasks.inference.engine.client import ServedModel
from tasks.inference.engine.metrics import GAUGES, parse_page, read_page_async

INTERVAL_SECONDS = 1.0
"""Between two readings of the engines' load."""

_log = logging.getLogger("stagecoach")


@dataclass(frozen=True)
class EngineLoad:
    """The load of one or more engines at one moment."""

    running: float
    """Requests in their batches."""
    waiting: float
    """Requests in their queues."""
    cache_use: float
    """Share of the fullest KV cache in use, from 0 to 1."""
    preemptions: float
    """Requests that were taken out of a batch again, counted since the engines started."""

    def __str__(self) -> str:
        return (
            f"{self.running:.0f} requests run, {self.waiting:.0f} wait, {self.cache_use:.0%} of the cache is in use, "
            f"{self.preemptions:.0f} preemptions"
        )


def load_of_page(page: str) -> EngineLoad | None:
    """Return the load on a page of metrics in the Prometheus text format; None where a metric is missing."""
    counters, gauges, _ = parse_page(page)
    preemptions = [value for (name, _), value in counters.items() if name == "preemptions"]
    if len(gauges) < len(GAUGES) or not preemptions:
        return None
    return EngineLoad(gauges["running"], gauges["waiting"], gauges["cache_use"], sum(preemptions))


def total_load(loads: Sequence[EngineLoad]) -> EngineLoad:
    """Return the load of several engines together; of their caches the fullest counts."""
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
    return EngineLoad(running, waiting, max(load.cache_use for load in loads), sum(load.preemptions for load in loads))


async def follow_loads(
    engines: Callable[[], Sequence[ServedModel]], *reports: Callable[[EngineLoad | None], None], limits: bool = False
) -> None:
    """Report the load of all `engines` together, to each of `reports`, once a second until cancelled.

    A reading to which an engine gave no answer is left out: the total would be that of those that are less busy.
    Engines without such metrics are left out, with a warning if a report `limits` rollouts by them; where there is no
    other, None is reported, and it ends.
    It goes on while there is no engine at all, as a replica that was lost may come back.
    """
    unmeasured = set[str]()
    while not (served := engines()) or {engine.url for engine in served} - unmeasured:
        measured = [engine for engine in served if engine.url not in unmeasured]
        loads = list[EngineLoad]()
        for engine in measured:
            page = await read_page_async(engine)
            load = None if page is None else load_of_page(page)
            if load:
                loads.append(load)
            elif page is not None:
                unmeasured.add(engine.url)
                if limits:
                    _log.warning("the engine at %s reports no queue under /metrics: no limit adapts to it", engine.url)
        if loads and len(loads) == sum(engine.url not in unmeasured for engine in measured):
            for report in reports:
                report(total_load(loads))
        await asyncio.sleep(INTERVAL_SECONDS)
    for report in reports:
        report(None)


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

    def report(self, load: EngineLoad | None) -> None:
        """Add a reading of the engine's load, if there is one."""
        with self._lock:
            self._reports += [load] if load else []

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
            self._reset()
            return load

    def _reset(self) -> None:
        self._since = self._at
        self._rollout_seconds = self._idle = self._waited = 0.0
        self._ended = self._cancelled = 0
        self._reports: list[EngineLoad] = []

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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
