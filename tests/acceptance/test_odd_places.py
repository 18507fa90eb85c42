"""A real run where paths have spaces, quotes and links, HOME takes nothing and TMPDIR is full."""

import errno
import shutil

import pytest

from tasks.learner.tiny import tiny_qwen3
from tests.acceptance.lives import SMALL, stagecoach
from tests.fixtures.driving import check_once
from tests.fixtures.faults import happened
from tests.fixtures.small_disks import mounted

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture
def full(tmp_path):
    """A real file system on which nothing more can be written."""
    for disk in mounted(tmp_path / "full", "64k"):
        with pytest.raises(OSError, match="No space") as refused:
            (disk / "filler").write_bytes(bytes(1 << 20))
        assert refused.value.errno == errno.ENOSPC
        happened(refused.value)
        yield disk


@pytest.mark.fault(
    "paths", "store, model, config and directory have spaces and links; HOME and TMPDIR are full", "the run as anywhere"
)
def test_a_run_comes_to_its_end_and_is_found_by_either_path(tmp_path, full, monkeypatch):
    place = tmp_path / "a b" / "ü 'q' \"z\" $HOME"
    place.mkdir(parents=True)
    shutil.copy(SMALL, place / "my config.toml")
    (place / "model link").symlink_to(tiny_qwen3(place / "mo del", seed=3))
    (tmp_path / "here").symlink_to(place)
    (tmp_path / "store link").symlink_to(place / "my store")
    for name in ("HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(full))
    run = ("run", "demo", "my config.toml", "model.path=model link", "--name", "first", "--plain")
    stagecoach(*run, "steps=1", "--store", "my store", cwd=tmp_path / "here")
    said = stagecoach(*run, "steps=2", "--store", str(tmp_path / "store link"), cwd=tmp_path / "here")
    assert "7 pieces of work to do, 9 cached" in said and f"--store '{tmp_path}/store link'" in said
    check_once(place / "my store", "first")
    assert stagecoach("repair", "--deep", "--store", str(tmp_path / "store link")) == "nothing is wrong\n"
    assert [path.name for path in full.iterdir()] == ["filler"]
