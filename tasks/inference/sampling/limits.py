"""Adapts the limit on rollouts in flight to the load that the engines report under `/metrics`.

Additive increase while the limit is what holds rollouts back, multiplicative decrease once requests queue or are
preempted: a preempted request is computed twice. And stops what is left of an environment of which enough groups have
ended.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

from tasks.inference.engine.client import ServedModel
from tasks.inference.engine.metrics import GAUGES, parse_page, read_page_async
from tasks.inference.trace_rows.failures import STRAGGLER, Failure

INTERVAL_SECONDS = 1.0
"""Between two readings of an engine's load."""
INITIAL_LIMIT = 8
"""Rollouts in flight before the first reading: few, because a cache that is overfull at once preempts all of them."""
MAX_CACHE_USE = 0.9
"""Share of the KV cache in use from which on the limit no longer rises."""
PATIENCE = 3
"""Readings in a row with waiting requests before the limit is halved."""
STEPS = 16
"""Readings that it takes from nothing to the largest limit while nothing waits."""

_log = logging.getLogger("stagecoach")


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine at one moment."""

    running: float
    """Requests in its batch."""
    waiting: float
    """Requests in its queue."""
    cache_use: float
    """Share of its KV cache in use, from 0 to 1."""
    preemptions: float
    """Requests that were taken out of the batch again, counted since the engine started."""

    def __str__(self) -> str:
        return (
            f"{self.running:.0f} requests run, {self.waiting:.0f} wait, {self.cache_use:.0%} of the cache is in use, "
            f"{self.preemptions:.0f} preemptions"
        )


def parse_metrics(text: str) -> EngineLoad | None:
    """Return the load from a page of metrics in the Prometheus text format; None where a metric is missing.

    An engine of several cores has a line for each: their counts are added up, of their caches the fullest counts.
    """
    counters, gauges, _ = parse_page(text)
    preemptions = [value for (name, _), value in counters.items() if name == "preemptions"]
    if len(gauges) < len(GAUGES) or not preemptions:
        return None
    return EngineLoad(gauges["running"], gauges["waiting"], gauges["cache_use"], sum(preemptions))


async def read_load(engine: ServedModel) -> EngineLoad | None:
    """Return the load of an engine; None where it has no such metrics. Raises ConnectionError without an answer."""
    page = await read_page_async(engine)
    if page is None:
        raise ConnectionError(f"no metrics from {engine.url}")
    return parse_metrics(page)


@dataclass(frozen=True)
class LimitState:
    """The limit, with what the next decision needs of earlier readings."""

    limit: int
    preemptions: float | None = None
    """At the last reading; None before the first."""
    readings_waiting: int = 0
    """Readings in a row with waiting requests."""


def next_state(state: LimitState, load: EngineLoad, in_use: int, max_limit: int) -> LimitState:
    """Return the state after a reading: a limit from 1 to `max_limit`.

    It is halved where preemptions rose or requests waited in PATIENCE readings. It rises where none waits, the cache
    has room and the limit is what holds rollouts back (`in_use` has reached it). Otherwise it stays.
    """
    risen = state.preemptions is not None and load.preemptions > state.preemptions
    readings_waiting = state.readings_waiting + 1 if load.waiting > 0 else 0
    limit = state.limit
    # A queue for one reading may be no more than a burst; a preemption has already cost a computation.
    if risen or readings_waiting >= PATIENCE:
        limit, readings_waiting = limit // 2, 0
    # `in_use` below the limit says that something else holds rollouts back: a higher limit would change nothing now
    # and be far too high later.
    elif not readings_waiting and load.cache_use < MAX_CACHE_USE and in_use >= limit:
        limit += max(1, max_limit // STEPS)
    return LimitState(min(max(limit, 1), max_limit), load.preemptions, readings_waiting)


class Limiter:
    """A semaphore whose limit can be changed while it is in use; first come, first admitted.

    asyncio's own semaphore has no such operation.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # admitted at the very moment of the cancellation
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def resize(self, limit: int) -> None:
        """Change the limit. A lower one stops nothing that was admitted; new entries wait until enough have left."""
        self.limit = limit
        self._admit()

    def _leave(self) -> None:
        self.in_use -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.in_use < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():  # one that was cancelled while it waited is done
                self.in_use += 1
                turn.set_result(None)


class AdaptiveLimit:
    """Adjusts a limiter to the load of the engines; one without metrics is left out, with one warning."""

    def __init__(self, limiter: Limiter, engines: Callable[[], Sequence[ServedModel]]) -> None:
        """`engines` returns the engines that sample now, each replica of one."""
        self._limiter, self._engines = limiter, engines
        self._max_limit = limiter.limit
        self._unmeasured = set[str]()
        """URLs of engines without metrics."""
        self._state = LimitState(min(INITIAL_LIMIT, limiter.limit))
        self.limits = [self._state.limit]
        """The limits so far, without repetitions in a row."""
        limiter.resize(self._state.limit)

    async def run(self) -> None:
        """Read the loads every second until cancelled, or until no engine with metrics is left."""
        while engines := [engine for engine in self._engines() if engine.url not in self._unmeasured]:
            loads = [load for load in [await self._read(engine) for engine in engines] if load]
            # With one of several silent, the limit would follow those that are less busy.
            if loads and len(loads) == sum(engine.url not in self._unmeasured for engine in engines):
                self._adjust(_worst_load(loads))
            await asyncio.sleep(INTERVAL_SECONDS)
        self._limiter.resize(self._max_limit)  # nothing left to adapt to

    async def _read(self, engine: ServedModel) -> EngineLoad | None:
        try:
            load = await read_load(engine)
        except ConnectionError:
            return None  # the ServiceWatch reports a lost engine; the next reading may succeed
        if load is None:
            self._unmeasured.add(engine.url)
            _log.warning(
                "the engine at %s reports no queue under /metrics: rollout.adaptive_in_flight leaves it out; without "
                "any engine that does, %d rollouts begin immediately (rollout.max_in_flight)",
                *(engine.url, self._max_limit),
            )
        return load

    def _adjust(self, load: EngineLoad) -> None:
        before = self._state.limit
        self._state = next_state(self._state, load, self._limiter.in_use, self._max_limit)
        if self._state.limit != before:
            self._limiter.resize(self._state.limit)
            self.limits.append(self._state.limit)
            _log.info("rollouts in flight: at most %d, before that %d (%s)", self._state.limit, before, load)


def total_load(loads: Sequence[EngineLoad]) -> EngineLoad:
    """Return the load of several replicas together; of their caches the fullest counts."""
    running, waiting = sum(each.running for each in loads), sum(each.waiting for each in loads)
    return EngineLoad(running, waiting, max(each.cache_use for each in loads), sum(each.preemptions for each in loads))


def _worst_load(loads: Sequence[EngineLoad]) -> EngineLoad:
    """Return one load for several engines, as if each were as busy as the busiest."""
    # What makes the limit fall must come through from the busiest; a mean would hide it.
    waiting, cache_use = max(each.waiting for each in loads), max(each.cache_use for each in loads)
    running, preemptions = sum(each.running for each in loads), sum(each.preemptions for each in loads)
    return EngineLoad(running, waiting, cache_use, preemptions)


class StoppedEarly(Exception):
    """A rollout was stopped because enough groups of its environment had ended."""


class GroupQuota:
    """Counts the groups that ended, by environment, and stops the other rollouts of an environment that has enough."""

    def __init__(self, num_groups: Mapping[str, int]) -> None:
        """`num_groups` says how many more groups of an environment are needed; one without a number needs all."""
        self._num_needed = dict(num_groups)
        self._scopes: dict[str, set[asyncio.Timeout]] = {}

    def is_reached(self, environment: str) -> bool:
        """Tell whether enough groups of an environment have ended."""
        return self._num_needed.get(environment, 1) <= 0

    def count_group(self, environment: str) -> None:
        """Count a group whose members all ended by themselves; stop the environment's others once there are enough."""
        if environment in self._num_needed:
            self._num_needed[environment] -= 1
            if self.is_reached(environment):
                now = asyncio.get_running_loop().time()
                for scope in self._scopes.pop(environment, ()):
                    scope.reschedule(now)

    @asynccontextmanager
    async def stop_when_reached(self, environment: str) -> AsyncIterator[None]:
        """Run the body, and cancel it once its environment has enough groups.

        Raises StoppedEarly then, and before the body where there were enough already.
        """
        if self.is_reached(environment):
            raise StoppedEarly
        # A time limit without a time: moving it to now cancels the body, and asyncio tells it from other cancellations.
        scope = asyncio.timeout(None)
        scopes = self._scopes.setdefault(environment, set())
        scopes.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise StoppedEarly from error
        finally:
            scopes.discard(scope)


def straggler_failure(environment: str, seconds: float | None) -> Failure:
    """Return the failure of a rollout that was stopped after `seconds`, or before it began (None)."""
    when = "before it was begun" if seconds is None else f"after {seconds:.1f} s"
    text = f"stopped {when}: enough groups of environment {environment!r} had ended (assignment.oversampling)"
    return Failure(STRAGGLER, "Stopped", text)
