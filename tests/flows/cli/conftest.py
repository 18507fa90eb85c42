"""A store that commands may damage."""

import shutil
from pathlib import Path

import pytest

from storage.maintenance import plan


@pytest.fixture
def root(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the module's store `original` in the working directory, in which runs finished long enough ago."""
    monkeypatch.setattr(plan, "RECENT_HOURS", 0.0)
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(original, tmp_path / "store"))
