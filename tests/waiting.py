"""Waiting for what is certain to come: as long as a busy machine may need, and a failure in words after that."""

import time
from collections.abc import Callable
from typing import NoReturn

PATIENCE = 240.0
"""Seconds until a wait counts as failed: a bound on hanging, not a claim on speed."""


def until(holds: Callable[[], object], told: Callable[[], str], every: float = 0.2) -> None:
    """Wait until something holds; fail with what is told when it does not."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(every)


def until_told(every: float = 0.2) -> NoReturn:
    """Wait until a signal ends this process, by what its handler raises.

    In short sleeps: a signal that comes between the last look at it and the sleep itself is seen at the end of the
    sleep. That is seldom, and less so where other threads ask for the interpreter at that moment.
    """
    while True:
        time.sleep(every)
