"""How many rollouts are under way at once, adapted to the load that the engine reports under `/metrics`."""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from tasks.inference.engine.scoring import Served

SECONDS = 5.0
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
CACHE_USE, PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"


@dataclass(frozen=True)
class EngineLoad:
    """What an engine said at one moment."""

    running: float
    """Requests in its batch."""
    waiting: float
    """Requests in its queue."""
    cache_use: float
    """Share of its cache of keys and values that is in use, from 0 to 1."""
    preemptions: float
    """Requests that were taken out of the batch again since it was started."""

    def __str__(self) -> str:
        return (
            f"{self.running:.0f} requests run, {self.waiting:.0f} wait, {self.cache_use:.0%} of the cache is in use, "
            f"{self.preemptions:.0f} preemptions"
        )


def parse(text: str) -> EngineLoad | None:
    """Return the reading in a page of metrics in the Prometheus text format; None where it is not all there.

    An engine of several cores has a line for each: what they count is added up, of the cache the fullest is taken.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name in (RUNNING, WAITING, CACHE_USE, PREEMPTIONS):
            found[name].append(float(rest.rpartition("}")[2].split()[0]))
    if len(found) < 4:
        return None
    return EngineLoad(sum(found[RUNNING]), sum(found[WAITING]), max(found[CACHE_USE]), sum(found[PREEMPTIONS]))


async def read(engine: Served) -> EngineLoad | None:
    """Ask an engine; None where it has no such metrics. Raises ConnectionError where it gives no answer."""
    import httpx

    headers = {"Authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}
    try:
        async with httpx.AsyncClient(timeout=SECONDS, trust_env=False) as client:
            answer = await client.get(f"{engine.url.rstrip('/')}/metrics", headers=headers)
    except httpx.TransportError as error:
        raise ConnectionError(f"no metrics from {engine.url}: {error or type(error).__name__}") from error
    if answer.status_code >= 500:
        raise ConnectionError(f"no metrics from {engine.url}: it answers {answer.status_code}")
    return parse(answer.text) if answer.status_code == 200 else None


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


def following(state: State, reading: EngineLoad, in_use: int, most: int) -> State:
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


class AdaptiveLimit:
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

    async def _read(self, engine: Served) -> EngineLoad | None:
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

    def _move(self, reading: EngineLoad) -> None:
        before = self._state.limit
        self._state = following(self._state, reading, self._limiter.in_use, self._most)
        if self._state.limit != before:
            self._limiter.resize(self._state.limit)
            self.limits.append(self._state.limit)
            _log.info("rollouts in flight: at most %d, before that %d (%s)", self._state.limit, before, reading)


def _worst(readings: Sequence[EngineLoad]) -> EngineLoad:
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
