"""When rollouts begin and stop: a limit on those in flight, its adaptation to the engines' load, a quota of groups.

BatchSampler makes one of each for a batch; all are on its event loop. AdaptiveLimit gets the loads that `load_meter`
reads: additive increase while the limit is what holds rollouts back, multiplicative decrease once requests queue or are
preempted, since a preempted request is computed twice.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tasks.inference.sampling.load_meter import EngineLoad
from tasks.inference.trace_rows.failures import STRAGGLER, Failure

INITIAL_LIMIT = 8
"""Rollouts in flight before the first reading: few, because a cache that is overfull at once preempts all of them."""
MAX_CACHE_USE = 0.9
"""Share of the KV cache in use from which on the limit no longer rises."""
PATIENCE = 3
"""Readings in a row with waiting requests before the limit is halved."""
STEPS = 16
"""Readings that it takes from nothing to the largest limit while nothing waits."""

_log = logging.getLogger("stagecoach")


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

    async def __aexit__(self, *exception: object) -> None:
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
    """Adjusts a limiter to the load of the engines, from 1 to the limit that it had."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter, self._max_limit = limiter, limiter.limit
        self._preemptions: float | None = None
        """At the last reading; None before the first."""
        self._readings_waiting = 0
        """Readings in a row with waiting requests."""
        limiter.resize(min(INITIAL_LIMIT, limiter.limit))

    def adjust(self, load: EngineLoad | None) -> None:
        """Take a reading: all engines together, None where none reports its load.

        The limit is halved where preemptions rose or requests waited in PATIENCE readings. It rises where none waits,
        the cache has room and the limit is what holds rollouts back. Otherwise it stays.
        """
        if load is None:  # nothing to adapt to
            self._limiter.resize(self._max_limit)
            return
        limit = before = self._limiter.limit
        has_preempted = self._preemptions is not None and load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        self._readings_waiting = self._readings_waiting + 1 if load.waiting else 0
        # A queue for one reading may be no more than a burst; a preemption has already cost a computation.
        if has_preempted or self._readings_waiting >= PATIENCE:
            limit, self._readings_waiting = max(limit // 2, 1), 0
        # Fewer rollouts than the limit say that something else holds them back: a higher limit would change nothing
        # now and be far too high later.
        elif not self._readings_waiting and load.cache_use < MAX_CACHE_USE and self._limiter.in_use >= limit:
            limit = min(limit + max(1, self._max_limit // STEPS), self._max_limit)
        if limit != before:
            self._limiter.resize(limit)
            _log.info("rollouts in flight: at most %d, before that %d (%s)", limit, before, load)


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
