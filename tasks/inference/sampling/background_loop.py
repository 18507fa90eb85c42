"""An event loop in a thread of its own, which signals cannot tear apart, and how late it runs (loop lag)."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

LOOK_SECONDS = 0.5
"""A signal that comes just before this thread waits is seen after so long at most."""
Made = TypeVar("Made")


def run_in_background_loop(work: Coroutine[Any, Any, Made]) -> Made:
    """Run a coroutine as `asyncio.run` does, and wait for it here; return what it returns, raise what it raises.

    Whatever is raised in the waiting thread meanwhile cancels the work, and is passed on when that has ended.
    """
    loop = asyncio.new_event_loop()
    begun: list[asyncio.Task[Made]] = []
    stopped, ended = threading.Event(), threading.Event()

    async def begin() -> None:
        task = asyncio.create_task(work)
        begun.append(task)
        if stopped.is_set():
            task.cancel()
        await asyncio.wait([task])

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(begin())
        finally:
            ended.set()

    thread = threading.Thread(target=copy_context().run, args=(run,), name="event loop")
    try:
        thread.start()
        while not ended.wait(LOOK_SECONDS):
            continue
    finally:
        stopped.set()
        with suppress(RuntimeError):  # the loop is closed: the work has ended by itself
            for task in begun:
                loop.call_soon_threadsafe(task.cancel)
        while thread.is_alive() and not ended.wait(LOOK_SECONDS):
            continue
    thread.join()
    return begun[0].result()


LAG_LOOK_SECONDS = 0.25


class LoopLag:
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
            await self._sleep(LAG_LOOK_SECONDS)
            self.add(clock() - before - LAG_LOOK_SECONDS)

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
