"""One store for all questions, made once: it is only read."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from flows.queries.views import relations
from storage.read.frames import Frames
from storage.store import open_store
from tests.flows.queries import every_outcome

Row = dict[str, Any]
Rows = Callable[[str, str], list[Row]]


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """The root of the store."""
    place = tmp_path_factory.mktemp("outcomes") / "store"
    every_outcome.everything(place)
    open_store(place).quarantines.record([every_outcome.UNFIT], where="trace_id = '...'", reason=every_outcome.REASON)
    return place


@pytest.fixture(scope="session")
def frames(root):
    """Its tables."""
    return Frames(open_store(root), relations)


@pytest.fixture(scope="session")
def rows(root):
    """Reads the rows of a table that a run's ledger names, each with the key and the inputs of its work.

    This is the way that stages read, entry by entry, and not that of the questions.
    """
    store = open_store(root)

    @cache
    def read(run, table):
        entries = [entry for entry in store.ledger.entries(run=run) if not entry.part and entry.slices(table)]
        return [
            row | {"key": entry.key, "inputs": entry.inputs, "step": entry.step}
            for entry in entries
            for row in store.read(entry.slices(table)).to_pylist()
        ]

    return read
