"""A gc that ends at a chosen moment: in a process of its own by SIGKILL.

Called as `python -m tests.storage.maintenance.gc_dying ROOT N`.

A moment is the time before or after anything that changes the store: a file written or deleted, a directory removed,
a commit to a table.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from storage.delta.table import StoredTable
from storage.maintenance import plan
from storage.maintenance import sweep as sweeping
from storage.maintenance.plan import PolicyRetention, plan_removal
from storage.maintenance.sweep import carry_out
from storage.roots import Root
from storage.store import Store, open_store

CHANGES = (
    (Root, "write"),
    (Root, "create"),
    (Root, "delete"),
    (StoredTable, "append"),
    (StoredTable, "replace"),
    (sweeping, "_remove_directory"),
)


class Died(BaseException):
    """Stands for SIGKILL within one process."""


@contextmanager
def moments(happen: Callable[[int], None]) -> Iterator[None]:
    """Call `happen` with 0, 1, 2, ... before and after every change of a store within the block."""
    number = iter(range(1_000_000))
    before = [(owner, name, getattr(owner, name)) for owner, name in CHANGES]

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(change)
        def watching(*arguments: Any, **others: Any) -> Any:
            happen(next(number))
            done = change(*arguments, **others)
            happen(next(number))
            return done

        return watching

    for owner, name, change in before:
        setattr(owner, name, watched(change))
    try:
        yield
    finally:
        for owner, name, change in before:
            setattr(owner, name, change)


def count_moments(act: Callable[[], object]) -> int:
    """Return how many moments there are in doing something."""
    seen: list[int] = []
    with moments(seen.append):
        act()
    return len(seen)


def die_at(wanted: int, act: Callable[[], object]) -> None:
    """Do something up to one of its moments."""

    def die(number: int) -> None:
        if number == wanted:
            raise Died

    try:
        with moments(die):
            act()
    except Died:
        return
    raise AssertionError(f"moment {wanted} never came")


def collect(store: Store) -> None:
    """Remove every run but `kept`, and thin that one's policies."""
    plan.RECENT_HOURS = 0.0
    carry_out(store, plan_removal(store, ["kept"], retention=PolicyRetention("last")))


def kill_at(wanted: int) -> Callable[[int], None]:
    """What to call at each moment so that the process dies at one of them."""
    return lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == wanted else None


if __name__ == "__main__":
    opened = open_store(sys.argv[1])
    with moments(kill_at(int(sys.argv[2]))):
        collect(opened)
