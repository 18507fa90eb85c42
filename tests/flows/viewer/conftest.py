"""Stores for all tests of the viewer that only look at them: a run and its replay."""

import pytest

from flows import cli
from flows.queries.store_reader import StoreReader
from tests.fixtures.rehearsal import rehearse
from tests.fixtures.replays import RLOO, ask, walk
from tests.flows.viewer.hand_made import HandMade


@pytest.fixture
def command(capsys):
    """Runs a command on a store; returns what it printed, or what it complained of where it ends with a status."""

    def run(root, *arguments, status=0):
        assert cli.main([*arguments, "--store", str(root)]) == status
        said = capsys.readouterr()
        return said.err if status else said.out

    return run


@pytest.fixture
def hand(tmp_path):
    """Writes a run of its own, row by row."""
    return HandMade(tmp_path / "store")


@pytest.fixture(scope="session")
def forked(tmp_path_factory):
    """A run of two steps, and a replay of it with another algorithm, up to packing."""
    root = tmp_path_factory.mktemp("forked") / "store"
    rehearse(root, "base", steps=2)
    walk(ask(root, name="fork", overrides=[RLOO]))
    return StoreReader.at(root)
