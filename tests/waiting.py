"""Waiting for what is certain to come: as long as a busy machine may need, and a failure in words after that."""

import time
from collections.abc import Callable

PATIENCE = 240.0
"""Seconds until a wait counts as failed: a bound on hanging, not a claim on speed."""


def until(holds: Callable[[], object], told: Callable[[], str], every: float = 0.2) -> None:
    """Wait until something holds; fail with what is told when it does not."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(every)
