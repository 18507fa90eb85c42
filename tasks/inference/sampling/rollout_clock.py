"""RolloutClock: the clock of the rollouts' time limits, which counts only time in which a rollout could get further.

It stands still while the event loop stands still (a stopped process, a paused machine) and while an engine does not
answer. ServiceWatch owns it and says which engines do; RolloutRunner reads it. All of them are on one event loop.
"""

import asyncio
import time
from collections.abc import Callable

TICK_SECONDS = 1.0
LONGEST_TICK_SECONDS = 5.0
"""What a tick counts at most: a loop that is later stood still, and is not only busy."""


class RolloutClock:
    """Counts seconds from its making on, without those in which rollouts stood still."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted, self._last = 0.0, clock()
        self._silent_since: dict[str, float] = {}
        """By URL of an engine that does not answer, when the first unanswered question was asked."""
        self.num_silences = 0
        """How often an engine began not to answer."""
        self.worst_lag = 0.0
        """Seconds that a tick was late at most: answers of the engine that have arrived wait about as long."""

    def now(self) -> float:
        """Return the seconds that count."""
        late = 0.0 if self._silent_since else min(self._clock() - self._last, LONGEST_TICK_SECONDS)
        return self._counted + late

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            self.tick()
            due = self._clock() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.worst_lag = max(self.worst_lag, self._clock() - due)

    def tick(self) -> None:
        """Count the time since the last tick."""
        self._counted, self._last = self.now(), self._clock()

    def is_silent(self, url: str) -> bool:
        """Tell whether an engine has not answered the last question."""
        return url in self._silent_since

    def note_silence(self, url: str, seconds: float) -> float:
        """Note that an engine left a question unanswered for `seconds`; return for how long it is silent by now."""
        self.tick()
        if url not in self._silent_since:
            if not self._silent_since:
                self._counted -= seconds  # they were counted while nobody knew
            self._silent_since[url] = self._clock() - seconds
            self.num_silences += 1
        return self._clock() - self._silent_since[url]

    def note_answer(self, url: str) -> None:
        """Note that an engine answers, or is watched no more."""
        self.tick()
        self._silent_since.pop(url, None)
