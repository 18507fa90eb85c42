"""PendingBatch: one step's batch while it is built, ahead of its step or when its step needs it.

Made by the training loop; read by the loop and by the builder of the next batch, which waits for engine or results.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from threading import Event

from flows.runtime.records import StepBatch


class PendingBatch:
    """One step's batch: built by a thread of `pool`, or without a pool by the first call of `result`."""

    def __init__(self, build: Callable[[Event], StepBatch], pool: ThreadPoolExecutor | None) -> None:
        """`build` sets its event when the engine may load the next policy."""
        self._engine_free = Event()
        self._build = None if pool else build
        # A thread starts with an empty context, and the current flow run is a context variable.
        self._future = pool.submit(copy_context().run, build, self._engine_free) if pool else Future[StepBatch]()
        self._future.add_done_callback(lambda _: self._engine_free.set())

    def wait_for_engine(self) -> None:
        """Block until the batch no longer needs the engine. Raises what building the batch raised."""
        if self._build:
            self.result()
        self._engine_free.wait()
        if self._future.done():
            self._future.result()

    def result(self) -> StepBatch:
        """Return the batch. Raises what building the batch raised."""
        if self._build:
            build, self._build = self._build, None  # it references the batch of the step before
            try:
                self._future.set_result(build(self._engine_free))
            except BaseException as error:
                self._future.set_exception(error)
        return self._future.result()
