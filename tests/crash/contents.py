"""What a store holds in the end, in a form in which two runs can be compared."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
from deltalake import DeltaTable

from storage.refs import Entry
from storage.schemas.stage_tables import TABLES
from storage.store import Store, open_store
from tests.crash.driving import NAME

Rows = dict[str, list[dict[str, Any]]]


def finished(store: Store) -> list[Entry]:
    """Return the ledger rows of the run's finished work, parts left out."""
    return [entry for entry in store.ledger.entries(run=NAME) if not entry.part]


def work(store: Store) -> list[tuple[str, int, str]]:
    """Return stage, step and key of everything finished."""
    return sorted((entry.stage, entry.step, entry.key) for entry in finished(store))


def rows(store: Store) -> Rows:
    """Return the rows of every table through the ledger, each with its step, in order of their names."""
    found: Rows = {}
    for entry in finished(store):
        for table in {piece.table for piece in entry.outputs}:
            read = store.read(entry.slices(table)).to_pylist()
            found.setdefault(table, []).extend({"step": entry.step, **row} for row in read)
    return {table: sorted(those, key=lambda row: row_id(table, row)) for table, those in found.items()}


def row_id(table: str, row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what names a row within a run."""
    return (row["step"], *(row[column] for column in TABLES[table].row_id))


def check_once(root: Path) -> None:
    """Assert that nothing is there twice: no ledger row, no row of a table, no slice in two pieces of work."""
    store = open_store(root)
    raw = DeltaTable(str(root / "tables" / "ledger")).to_pyarrow_table().to_pylist()
    doubled = [name for name, count in Counter((r["run"], r["key"], r["part"]) for r in raw).items() if count > 1]
    assert not doubled, f"ledger rows that are there twice: {doubled}"
    for table, those in rows(store).items():
        names = [row_id(table, row) for row in those]
        assert len(names) == len(set(names)), f"{table} has rows twice"
        scanned = store.scan(table).filter(pl.col("run") == NAME).collect().height
        assert scanned == len(those), f"{table}: who scans it sees other rows than a stage"


def weights(store: Store) -> list[tuple[int, str]]:
    """Return version and digest of the weights of every policy, digests as the files on disk have them now."""
    from tasks.learner.digest import weights_sha256

    found = []
    for row in rows(store)["policies"]:
        directory = store.policies.directory(row["policy_key"], verify=True)
        assert weights_sha256(directory) == row["weights_sha256"]
        found.append((row["version"], row["weights_sha256"]))
    return sorted(found)


def committed_groups(store: Store) -> set[str]:
    """Return the groups that are safe: in a part that the ledger names."""
    parts = [entry for entry in store.ledger.entries(stage="rollout") if entry.part]
    return {row["group_id"] for entry in parts for row in store.read(entry.slices("traces"), ["group_id"]).to_pylist()}


def without_ambient(found: Rows) -> Rows:
    """Leave out what no run has in common with another: nothing but the learner's wall-clock, where it notes one."""
    for row in found["updates"]:
        row["metrics"] = {name: value for name, value in json.loads(row["metrics"]).items() if "second" not in name}
    found["metrics"] = [row for row in found["metrics"] if "second" not in row["name"]]
    return found
