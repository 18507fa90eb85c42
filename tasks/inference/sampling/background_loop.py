"""run_in_background_loop: an event loop in a thread of its own, for samplers that a signal may interrupt."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

POLL_SECONDS = 0.5
"""Upper bound on how late a signal is noticed that arrives just before the thread waits."""
Result = TypeVar("Result")


def run_in_background_loop(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine as `asyncio.run` does, in a thread; return what it returns, raise what it raises.

    An exception that a signal raises in the waiting thread cancels the coroutine, and is passed on once that has ended.
    """
    # Such an exception (KeyboardInterrupt, the cancellation of a flow) is raised in the main thread, between any two
    # instructions. Were the loop there, it could strike inside a callback and tear the loop's state apart; here it
    # strikes the waiting thread alone.
    loop = asyncio.new_event_loop()  # made here, so that this thread can cancel through it at any time
    started: list[asyncio.Task[Result]] = []
    cancelled, ended = threading.Event(), threading.Event()

    async def start_work() -> None:
        task = asyncio.create_task(coroutine)
        started.append(task)
        if cancelled.is_set():  # by a signal that came before there was a task to cancel
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
        # Not `thread.join()`: a wait without a time limit may not notice a signal that arrives just before it.
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
