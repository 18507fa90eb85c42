"""Finished work in a store, with its ledger rows: added, shared and counted."""

import polars as pl

from storage.store import Store
from tests.fixtures.rows import entry, messages


def add(store: Store, key: str, run: str = "a", count: int = 4, part: str = "", commit: bool = True) -> str:
    """Write messages under a key and, if so asked, the ledger row; return the attempt."""
    attempt = f"attempt-{run}-{key}{part}"
    made = store.append("messages", messages(count), run=run, step=int(key), key=key, attempt=attempt)
    if commit:
        store.ledger.commit(entry(key, run, part=part, outputs=(made,), attempt=attempt, step=int(key)))
    if run not in store.runs.names():
        store.runs.record(run=run, event="started", kind="train", config={})
    return attempt


def share(store: Store, key: str, run: str) -> None:
    """Let another run use finished work."""
    found = store.ledger.find(key)
    assert found is not None
    store.ledger.commit(entry(key, run, outputs=found.outputs, attempt=found.attempt, step=found.step))
    store.runs.record(run=run, event="started", kind="replay", config={})


def counts(frame: pl.LazyFrame) -> dict[str, int]:
    return dict(frame.group_by("key").len().collect().iter_rows())
