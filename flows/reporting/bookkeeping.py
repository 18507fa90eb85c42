"""Calls to Prefect that a run makes on its way: each has a time limit, and none of them stops the run."""

import threading
import time
from collections.abc import Callable
from contextvars import copy_context

PATIENCE_SECONDS = 5.0
"""Longest wait for one call. A busy server takes a second or two."""
LAST_SECONDS = 60.0
"""Longest wait for a call that nobody repeats. A client that is refused asks again five times in 62 seconds."""


class Bookkeeper:
    """Makes calls one at a time, each in a thread of its own; threads of the run may share one.

    A call that takes longer than PATIENCE_SECONDS goes on in its thread, and what is asked for meanwhile is left out:
    whoever asks has to ask again later. `tell` is called once when nobody answers, and once when somebody does again.
    """

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._late_since: float | None = None

    def call(self, work: Callable[[], bool], last: bool = False) -> bool:
        """Do `work`, which says whether it was answered; return whether it was in time. Does nothing while one is late.

        It is called in the context of the caller, which Prefect knows the flow run by. The last call, after which
        nobody asks again, has more time, which one that is late before it shares.
        """
        until = time.monotonic() + (LAST_SECONDS if last else PATIENCE_SECONDS)
        if not self._lock.acquire(timeout=LAST_SECONDS if last else 0):
            return False
        begun, answers, ended = time.monotonic(), list[bool](), threading.Event()

        def run() -> None:
            try:
                answers.append(work())
            finally:
                self._lock.release()
                ended.set()
                self._note_answer(begun, answered=bool(answers and answers[0]))

        threading.Thread(target=copy_context().run, args=(run,), name="bookkeeping", daemon=True).start()
        if ended.wait(until - time.monotonic()):
            return bool(answers and answers[0])
        self._note_silence(begun)
        return False

    def _note_silence(self, begun: float) -> None:
        if self._late_since is None:
            self._late_since = begun
            self._tell("Prefect does not answer: the run goes on, and its pages there are late")

    def _note_answer(self, begun: float, answered: bool) -> None:
        late, self._late_since = self._late_since, None if answered else self._late_since
        if late is not None and answered:
            self._tell(f"Prefect answers again, after {time.monotonic() - late:.0f} s")
