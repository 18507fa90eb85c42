"""Stores for commands: one that they may damage, one that they only read."""

import shutil
from pathlib import Path

import pytest

from benchmarks.fixtures.large_store import make
from storage.maintenance import plan
from storage.store import open_store
from tests.fixtures.commands import run_command


@pytest.fixture
def root(original, tmp_path, monkeypatch):
    """A copy of the module's store `original` in the working directory, in which runs finished long enough ago."""
    monkeypatch.setattr(plan, "RECENT_HOURS", 0.0)
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(original, tmp_path / "store"))


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """A function that runs a command on the test's store, which is in `store` or is the test's directory itself."""

    def run(*argv):
        store = tmp_path / "store"
        monkeypatch.setenv("STAGECOACH_STORE", str(store if store.exists() else tmp_path))
        return run_command(capsys, *argv)

    return run


@pytest.fixture(scope="session")
def forked(tmp_path_factory):
    """A store with the run `large`, its evaluations, and two forks of it; commands only read it."""
    place = tmp_path_factory.mktemp("forked") / "store"
    make(place, steps=3, rollouts=16, group_size=8, fork=2)
    return place


@pytest.fixture(scope="session")
def trace_id(forked):
    """The first rollout by id of the run `large` in step 1, which is not evaluated."""
    rows = open_store(forked).scan("traces").filter(run="large", step=1).select("trace_id").collect()
    return str(min(rows["trace_id"]))
