"""GroupCommitter: a thread that commits, in one group, all items that were put since its last commit.

The commit queue of a run, the parts of a stage and the cache of turns own one each. Any thread may put items and never
waits for the disk: a slow disk means larger groups, not a queue. Items are committed in the order in which they came,
and leave `waiting` only when the commit that has them is durable.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class GroupCommitter(Generic[Item]):
    """Commits items in groups; a failed commit is raised by the next call of a caller, and tried again."""

    def __init__(
        self,
        name: str,
        commit: Callable[[Sequence[Item]], None],
        linger_seconds: float = 0.0,
        pause_seconds: float = 0.0,
        pause_ratio: float = 0.0,
        max_waiting: float = math.inf,
        on_refusal: Callable[[Exception], None] | None = None,
    ) -> None:
        """`name` is that of the thread, which `start` starts.

        An item waits up to `linger_seconds` for others that share its commit; `max_waiting` items do not wait. After a
        commit there is a pause of `pause_seconds`, or `pause_ratio` durations of that commit if that is longer. With
        `on_refusal`, errors go there instead of to callers, and the commit is tried again after the pause.
        """
        self._commit, self._on_refusal = commit, on_refusal
        self._linger_seconds, self._max_waiting = linger_seconds, max_waiting
        self._pause_seconds, self._pause_ratio = pause_seconds, pause_ratio
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._waiting: list[Item] = []
        self._due, self._not_before = math.inf, 0.0
        """When the next commit is due, and the end of the pause before it."""
        self._num_flushing = 0
        self._stopping = self._drops = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def waiting(self) -> list[Item]:
        """The items that are not committed, those of a running commit included."""
        with self.lock:
            return list(self._waiting)

    def put(self, item: Item, linger_seconds: float | None = None) -> None:
        """Hand over an item; returns immediately. Raises the failure of an earlier commit, and then takes nothing."""
        with self.lock:
            self.raise_failure()
            self._waiting.append(item)
            linger = self._linger_seconds if linger_seconds is None else linger_seconds
            self._due = min(self._due, time.monotonic() + linger)
            self._changed.notify_all()

    def flush_soon(self) -> None:
        """Let the waiting items be committed now, without waiting for it."""
        with self.lock:
            if self._waiting:
                self._due = 0.0
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all items are committed. Raises the failure of a commit; it can be called again then."""
        with self.lock:
            self._num_flushing += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._waiting or self.failure)
            finally:
                self._num_flushing -= 1
            self.raise_failure()

    def stop(self, drop: bool = False) -> None:
        """End the thread; it tries to commit the waiting items once, unless they `drop`."""
        with self.lock:
            self._stopping, self._drops = True, drop
            self._changed.notify_all()
        self._thread.join()

    def raise_failure(self) -> None:
        """Raise the failure of the last commit, if it failed; the commit is then tried again."""
        with self.lock:
            failure, self.failure = self.failure, None
            if failure is not None:
                self._due = self._not_before = 0.0
                self._changed.notify_all()
                raise failure

    def _run(self) -> None:
        while items := self._take():
            began = time.monotonic()
            failure = self._try(items)
            with self.lock:
                if failure is None:
                    del self._waiting[: len(items)]
                    self.failure = None
                elif self._on_refusal and isinstance(failure, Exception):
                    self._on_refusal(failure)
                    self._due = 0.0
                else:
                    self.failure = failure
                took = time.monotonic() - began
                self._not_before = began + took + max(self._pause_seconds, self._pause_ratio * took)
                self._changed.notify_all()
                if failure is not None and self._stopping:
                    return

    def _try(self, items: Sequence[Item]) -> BaseException | None:
        try:
            self._commit(items)
        except BaseException as failure:  # for the next caller
            return failure
        return None

    def _take(self) -> list[Item]:
        """Wait for items that are due and return all; none at the end."""
        with self.lock:
            self._changed.wait_for(lambda: self._stopping or (self._waiting and self.failure is None))
            while not (self._stopping or self._num_flushing or len(self._waiting) >= self._max_waiting):
                seconds = max(self._due, self._not_before) - time.monotonic()
                if seconds <= 0:
                    break
                self._changed.wait(seconds)
            self._due = math.inf  # of items that are put from now on
            return [] if self._stopping and self._drops else list(self._waiting)
