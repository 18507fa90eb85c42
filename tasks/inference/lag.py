"""Lag: how late an event loop comes back to what it was to do."""

import asyncio
from collections.abc import Awaitable, Callable

LOOK_SECONDS = 0.25


class Lag:
    """Measures how much later than asked a sleep of the running event loop ends; in seconds.

    Everything on the loop waits at least that long: an answer of the engine that has come, a time limit that is over.
    """

    def __init__(
        self, clock: Callable[[], float] | None = None, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self.worst = 0.0
        self.total = 0.0
        self.num_looks = 0

    async def run(self) -> None:
        """Look until cancelled."""
        clock = self._clock or asyncio.get_running_loop().time
        while True:
            before = clock()
            await self._sleep(LOOK_SECONDS)
            self.add(clock() - before - LOOK_SECONDS)

    def add(self, late: float) -> None:
        """Count one look; clocks that are read in a hurry may say less than nothing."""
        late = max(0.0, late)
        self.num_looks += 1
        self.total += late
        self.worst = max(self.worst, late)

    def __str__(self) -> str:
        if not self.num_looks:
            return "the event loop was not looked at"
        average = self.total / self.num_looks
        return f"the event loop was {average:.3f} s late on average and {self.worst:.3f} s at worst"
