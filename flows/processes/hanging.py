"""Services that live and do not answer: found by asking, ended, and so started again by whoever watches them."""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

ASK_SECONDS = 5.0


class Ended(Protocol):
    """What is asked of a service's handle."""

    def ready_report(self) -> tuple[int, dict[str, Any]] | None:
        """The present generation and its report, once it is ready; None while there is none."""
        ...

    def restart(self, why: str = "", generation: int | None = None) -> None:
        """End a generation, so that another is started."""
        ...


class HangWatch:
    """A thread that asks one service again and again whether it hangs; what it asks with waits as long as it takes."""

    def __init__(self, handle: Ended, name: str, hangs: Callable[[dict[str, Any]], bool]) -> None:
        self._handle = handle
        self._name = name
        self._hangs = hangs
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"ask {name}", daemon=True).start()

    def close(self) -> None:
        """Ask no more; returns at once, also where a question is under way."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(ASK_SECONDS):
            ready = self._handle.ready_report()
            if ready is not None and self._hangs(ready[1]) and not self._closed.is_set():
                logging.getLogger(__name__).warning("service %r does not answer: it is started again", self._name)
                self._handle.restart("did not answer any more and was ended", ready[0])
