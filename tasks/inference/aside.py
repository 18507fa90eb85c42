"""An event loop in a thread of its own, so that what a signal's handler raises ends the work and is not lost in it.

A handler raises in the main thread, wherever that is. In a task or a callback of a loop asyncio takes what is raised
for the end of that task alone, or logs it, and the loop goes on; all but SIGINT, which asyncio knows itself.
"""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

LOOK_SECONDS = 0.5
"""A signal that comes just before this thread waits is seen after so long at most."""
Made = TypeVar("Made")


def run_aside(work: Coroutine[Any, Any, Made]) -> Made:
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
