"""Imports without the garbage collector: it stays away, and is back afterwards."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tasks.runtime.imports import quick_imports

ENOUGH = 200_000
"""Objects that would have been collected many times."""


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that this thread collects meanwhile; what another asks for is no matter of imports here."""
    seen: list[int] = []
    here = threading.get_ident()

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and threading.get_ident() == here:
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.unfreeze()


def test_nothing_is_collected_meanwhile_and_what_was_made_is_left_alone_later(collections: list[int]) -> None:
    with quick_imports():
        made = [[] for _ in range(ENOUGH)]
        assert collections == []
    assert gc.isenabled() and gc.get_freeze_count() >= ENOUGH
    more = [[] for _ in range(ENOUGH)]
    assert collections and len(made) == len(more), "without the block they are collected"


def test_the_collector_is_back_after_a_failure_and_stays_off_where_it_was_off(collections: list[int]) -> None:
    with pytest.raises(ImportError), quick_imports():
        raise ImportError("planted")
    assert gc.isenabled()
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
