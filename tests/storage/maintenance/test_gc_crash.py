"""A gc that dies at any moment leaves a store in which no row names what is gone; the next call finishes it."""

import shutil
import subprocess
import sys
from functools import partial

import pytest

from storage.maintenance import plan
from storage.store import open_store
from tests.fixtures.dying import collect, count_moments, die_at
from tests.fixtures.faults import happened
from tests.fixtures.histories import contents, train


@pytest.fixture
def full(root, store, monkeypatch):
    """A store with runs to remove, a kept run that shares a step with one, and policies to thin."""
    monkeypatch.setattr(plan, "RECENT_HOURS", 0.0)
    train(store, "first", "xy")
    train(store, "kept", "xzzz")
    train(store, "last", "y")
    return root


def left(root):
    """What counts of a store: names of data files that a table holds or the disk has, policies, rows."""
    store = open_store(root)
    disk = {path.name for path in root.glob("tables/messages/run=*/*.parquet")}
    return disk, store.policies.names(), len(store.ledger.entries())


def check(root, before):
    store = open_store(root)
    every = contents(store, [entry.run for entry in store.ledger.entries()])
    assert {row: rows for row, rows in every.items() if row[0] == "kept"} == before
    keys = {entry.key for entry in store.ledger.entries() if entry.run != "kept" and entry.stage == "training"}
    assert keys <= set(store.policies.names())


@pytest.mark.nightly
@pytest.mark.fault(
    "process", "gc dies before and after each of its changes", "no row names what is gone; the next gc finishes"
)
@pytest.mark.engine
def test_dying_at_any_moment(full, tmp_path):
    before = contents(open_store(full), ["kept"])
    whole = tmp_path / "whole"
    shutil.copytree(full, whole)
    num_moments = count_moments(lambda: collect(open_store(whole)))
    expected = left(whole)
    assert expected[0] < left(full)[0] and len(expected[1]) == 3 and expected[2] == 8
    assert num_moments > 30
    happened(f"died at each of {num_moments} moments")
    for moment in range(num_moments):
        root = tmp_path / str(moment)
        shutil.copytree(full, root)
        assert die_at(moment, partial(collect, open_store(root)))
        check(root, before)
        collect(open_store(root))
        check(root, before)
        assert left(root) == expected, f"after dying at moment {moment}"


@pytest.mark.fault("process", "gc is killed at one of its moments", "no row names what is gone; the next gc finishes")
@pytest.mark.engine
@pytest.mark.parametrize("moment", [2, 9, 21, 30])
def test_killed_for_real(full, moment):
    before = contents(open_store(full), ["kept"])
    command = [sys.executable, "-m", "tests.fixtures.dying", str(full), str(moment)]
    assert subprocess.run(command, timeout=120, check=False).returncode == -9
    happened("status -9")
    check(full, before)
    collect(open_store(full))
    check(full, before)
    assert left(full)[1:] == (["training-x", "training-xzz", "training-xzzz"], 8)
