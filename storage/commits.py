"""GroupCommitter: a thread that commits, in one group, all items that were put since its last commit.

The commit queue of a run, the parts of a stage and the cache of turns are such. Any thread may put items and never
waits for the disk: a slow disk means larger groups, not a queue. Items are committed in the order in which they came,
and leave `waiting` only when the commit that has them is durable.
"""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class GroupCommitter(ABC, Generic[Item]):
    """Commits items in groups; a failed commit is raised by the next call of a caller, and tried again."""

    def __init__(
        self,
        name: str,
        linger_seconds: float,
        pause_ratio: float = 0.0,
        max_waiting: float = math.inf,
        on_refusal: Callable[[Exception], None] | None = None,
    ) -> None:
        """`name` is that of the thread, which `start` starts.

        An item waits up to `linger_seconds` for others that share its commit; `max_waiting` items do not wait. After a
        commit there is a pause of `pause_ratio` durations of that commit. With `on_refusal`, errors go there instead of
        to callers, and the commit is tried again after `linger_seconds`.
        """
        self._on_refusal, self._linger_seconds = on_refusal, linger_seconds
        self._max_waiting, self._pause_ratio = max_waiting, pause_ratio
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._waiting: list[Item] = []
        self._due, self._not_before = math.inf, 0.0
        """When the next commit is due, and the end of the pause before it."""
        self._num_flushing = 0
        self._stopping = self._drops = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _commit(self, items: Sequence[Item]) -> None:
        """Commit a group, durable; called in the thread."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def waiting(self) -> list[Item]:
        """The items that are not committed, those of a running commit included."""
        with self.lock:
            return list(self._waiting)

    def put(self, item: Item) -> None:
        """Hand over an item; returns immediately. Raises the failure of an earlier commit, and then takes nothing."""
        with self.lock:
            self.raise_failure()
            self._waiting.append(item)
            self._due = min(self._due, time.monotonic() + self._linger_seconds)
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
            began, failure = time.monotonic(), None
            try:
                self._commit(items)
            except BaseException as error:  # for the next caller
                failure = error
            with self.lock:
                ended = time.monotonic()
                self._not_before = ended + self._pause_ratio * (ended - began)
                if failure is None:
                    del self._waiting[: len(items)]
                    self.failure = None
                elif self._on_refusal and isinstance(failure, Exception):
                    self._on_refusal(failure)
                    self._due = ended + self._linger_seconds
                else:
                    self.failure = failure
                self._changed.notify_all()
                if failure is not None and self._stopping:
                    return

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
