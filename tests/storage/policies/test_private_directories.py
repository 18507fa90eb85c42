"""Directories for sockets and weights in places that users share: this user's alone, whoever came first."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from flows.services.base import Supervisor, temporary_directory
from storage.errors import StoreError
from storage.policies.scratch import ScratchDirectories
from storage.policies.store import Policies
from storage.roots import make_private_directory, open_root, user_directory
from tests.fixtures.faults import happened

ANOTHER_USER = 65534


@pytest.fixture
def shared(monkeypatch):
    """A place that users share, with a name that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield Path(place)


def belongs_to_another(place):
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    os.chown(place, ANOTHER_USER, ANOTHER_USER)
    happened(f"owner {place.stat().st_uid}")


def is_a_link(place):
    (place.parent / "elsewhere").mkdir()
    place.symlink_to("elsewhere")
    happened(f"link to {os.readlink(place)}")


def others_can_write(place):
    place.mkdir()
    place.chmod(0o777)
    happened(f"mode {place.stat().st_mode:o}")


def is_a_file(place):
    place.write_text("")
    happened("a file")


PLANTS = [
    pytest.param(
        belongs_to_another,
        marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives a directory to another user"),
    ),
    is_a_link,
    others_can_write,
    is_a_file,
]


@pytest.mark.fault("paths", "another user's directory, or a link, in a shared place", "refused, nothing written")
@pytest.mark.parametrize("plant", PLANTS)
def test_a_directory_that_others_could_exchange_is_refused(shared, tmp_path, plant):
    place, store = user_directory(shared), open_root(str(tmp_path / "store"))
    assert temporary_directory() == place
    plant(place)
    (shared / "below").mkdir()
    plant(copies := shared / "below/copies")
    supervisor = Supervisor("run", tmp_path / "logs")
    for make in (
        supervisor.__enter__,
        lambda: supervisor.scratch_in(shared),
        lambda: Policies(store).scratch("key", memory=shared),
        lambda: ScratchDirectories(copies / ".scratch", private=copies).make("key"),
    ):
        with pytest.raises(StoreError, match="no directory of this user alone"):
            make()
    assert not any(list(path.iterdir()) for path in (place, copies) if path.is_dir())


def test_the_user_alone_can_enter_it(tmp_path):
    before = os.umask(0)
    try:
        directory = Policies(open_root(str(tmp_path / "store"))).scratch("key", memory=tmp_path / "memory")
    finally:
        os.umask(before)
    assert directory.parent == user_directory(tmp_path / "memory")
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700


def test_one_that_others_can_only_read_is_closed_to_them(tmp_path):
    (place := tmp_path / "place").mkdir()
    place.chmod(0o755)
    make_private_directory(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
