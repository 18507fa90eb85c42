"""In flight: how many rollouts are under way at once, and how that follows what the engine says of itself.

The rule is that of TCP's congestion control (Jacobson 1988): a little more for as long as the engine keeps up, half
where it does not. What says so is the engine's own metrics: requests that wait, and requests that were taken off the
processor again because the cache of keys and values was full (preemptions), whose tokens are computed twice.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from tasks.inference.engine_metrics import Reading, read
from tasks.inference.scoring import Served

LOOK_SECONDS = 1.0
START = 8
"""Rollouts at once before the engine was first asked."""
FULL = 0.9
"""Share of the cache in use from which on no more is begun."""
PATIENCE = 3
"""Readings in a row in which requests wait before the limit is halved."""
STEPS = 16
"""Readings that it takes from nothing to the most, as long as all goes well."""

_log = logging.getLogger("stagecoach")


@dataclass(frozen=True)
class State:
    """The limit, and what of earlier readings decides about the next one."""

    limit: int
    preemptions: float | None = None
    """As last read; None before the first reading."""
    waited: int = 0
    """Readings in a row in which requests waited."""


def following(state: State, reading: Reading, in_use: int, most: int) -> State:
    """Return the state after a reading: a limit from 1 to `most`.

    Half where preemptions rose or requests have waited for PATIENCE readings; more where none waits, the cache has room
    and the limit is what holds rollouts back (`in_use` has reached it); else as it was.
    """
    risen = state.preemptions is not None and reading.preemptions > state.preemptions
    waited = state.waited + 1 if reading.waiting > 0 else 0
    limit = state.limit
    if risen or waited >= PATIENCE:
        limit, waited = limit // 2, 0
    elif not waited and reading.cache_use < FULL and in_use >= limit:
        limit += max(1, most // STEPS)
    return State(min(max(limit, 1), most), reading.preemptions, waited)


class Limiter:
    """A bound on how many are inside at once, which may be moved while some are; whoever came first goes in first."""

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
            if not turn.cancelled():  # let in at the very moment of giving up
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def resize(self, limit: int) -> None:
        """Move the bound. A lower one sends nobody out: it holds back those who come until enough have left."""
        self.limit = limit
        self._admit()

    def _leave(self) -> None:
        self.in_use -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.in_use < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.in_use += 1
                turn.set_result(None)


class Steering:
    """Moves a limiter by what the engines say; one without metrics is left out, and said so once."""

    def __init__(self, limiter: Limiter, engines: Sequence[Served]) -> None:
        self._limiter = limiter
        self._most = limiter.limit
        self._engines = list(engines)
        self._state = State(min(START, limiter.limit))
        self.limits = [self._state.limit]
        """The limits so far, each once in a row."""
        limiter.resize(self._state.limit)

    async def run(self) -> None:
        """Ask every second until cancelled, or until no engine is left that answers."""
        while self._engines:
            readings = [reading for reading in [await self._read(each) for each in list(self._engines)] if reading]
            if readings and len(readings) == len(self._engines):
                self._move(_worst(readings))
            await asyncio.sleep(LOOK_SECONDS)
        self._limiter.resize(self._most)

    async def _read(self, engine: Served) -> Reading | None:
        try:
            reading = await read(engine)
        except ConnectionError:
            return None  # whoever watches the engine says so; the next one may answer
        if reading is None:
            self._engines.remove(engine)
            _log.warning(
                "the engine at %s says nothing of its queue under /metrics: rollout.adaptive_in_flight leaves it out%s",
                engine.url,
                "" if self._engines else f", and {self._most} rollouts are begun at once (rollout.max_in_flight)",
            )
        return reading

    def _move(self, reading: Reading) -> None:
        before = self._state.limit
        self._state = following(self._state, reading, self._limiter.in_use, self._most)
        if self._state.limit != before:
            self._limiter.resize(self._state.limit)
            self.limits.append(self._state.limit)
            _log.info("rollouts in flight: at most %d, before that %d (%s)", self._state.limit, before, reading)


def _worst(readings: Sequence[Reading]) -> Reading:
    """Return one reading for several engines, as if each were as busy as the busiest."""
    first, *others = readings
    for other in others:
        first = replace(
            first,
            running=first.running + other.running,
            waiting=max(first.waiting, other.waiting),
            cache_use=max(first.cache_use, other.cache_use),
            preemptions=first.preemptions + other.preemptions,
        )
    return first
