"""A new store for each test, at a root whose name holds a space."""

from pathlib import Path

import pytest

from storage.store import Store, open_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "my store"


@pytest.fixture
def store(root: Path) -> Store:
    return open_store(root)
