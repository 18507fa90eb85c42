"""Runs coroutines on an event loop in a thread of its own, and measures how late that loop runs (loop lag).

The exception of a signal (KeyboardInterrupt, the cancellation of a flow) is raised in the main thread, between any two
instructions. Were the loop there, it could strike inside a callback and tear the loop's state apart; here it strikes
the waiting thread alone, which then cancels the coroutine.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

POLL_SECONDS = 0.5
"""Upper bound on how late a signal is noticed that arrives just before the thread waits."""
LAG_INTERVAL_SECONDS = 0.25
"""Length of the sleeps that are measured."""
Result = TypeVar("Result")


def run_in_background_loop(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine as `asyncio.run` does, in a thread; return what it returns, raise what it raises.

    An exception that a signal raises in the waiting thread cancels the coroutine, and is passed on once that has ended.
    """
    loop = asyncio.new_event_loop()
    started: list[asyncio.Task[Result]] = []
    cancelled, ended = threading.Event(), threading.Event()

    async def start_work() -> None:
        task = asyncio.create_task(coroutine)
        started.append(task)
        if cancelled.is_set():
            task.cancel()
        await asyncio.wait([task])

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(start_work())
        finally:
            ended.set()

    thread = threading.Thread(target=copy_context().run, args=(run,), name="event loop")
    try:
        thread.start()
        while not ended.wait(POLL_SECONDS):
            continue
    finally:
        cancelled.set()
        with suppress(RuntimeError):  # the loop is closed: the coroutine has ended by itself
            for task in started:
                loop.call_soon_threadsafe(task.cancel)
        while thread.is_alive() and not ended.wait(POLL_SECONDS):
            continue
    thread.join()
    return started[0].result()


class LoopLag:
    """Measures how much later than requested a sleep on the running event loop ends, in seconds.

    Everything on the loop waits about that long: an answer of the engine that has arrived, a time limit that is over.
    """

    def __init__(
        self, clock: Callable[[], float] | None = None, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self.worst = 0.0
        self.total = 0.0
        self.num_samples = 0

    async def run(self) -> None:
        """Measure until cancelled."""
        clock = self._clock or asyncio.get_running_loop().time
        while True:
            before = clock()
            await self._sleep(LAG_INTERVAL_SECONDS)
            self.add(clock() - before - LAG_INTERVAL_SECONDS)

    def add(self, late: float) -> None:
        """Count one measurement; a clock of low resolution may give a negative one, which counts as 0."""
        late = max(0.0, late)
        self.num_samples += 1
        self.total += late
        self.worst = max(self.worst, late)

    def __str__(self) -> str:
        if not self.num_samples:
            return "the event loop's lag was not measured"
        average = self.total / self.num_samples
        return f"the event loop was {average:.3f} s late on average and {self.worst:.3f} s at worst"
