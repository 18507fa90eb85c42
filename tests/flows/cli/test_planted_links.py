"""Symbolic links planted in a store that lead out of it: nothing outside is deleted, emptied or written to."""

import json
import os
import shutil

import pytest

from configs.run import RunConfig
from flows.runtime.demo_sources import sources_directory
from flows.runtime.session import log_directory
from flows.services.base import Supervisor
from flows.services.process import ServiceFailed
from storage.errors import StoreError
from storage.policies.scratch import ScratchDirectories
from storage.policies.store import SCRATCH_DIRECTORY, Policies
from storage.roots import open_root
from storage.store import open_store
from tests.fixtures.commands import file_bytes
from tests.fixtures.faults import happened
from tests.fixtures.histories import age, two_runs


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store with two finished runs that share a step, with logs and what killed processes left."""
    place = two_runs(tmp_path_factory.mktemp("links") / "store")
    leftovers = ("logs/old/engine.log", "removals/left.json", f"{SCRATCH_DIRECTORY}/left/file", "tables/messages/.left")
    for left in leftovers:
        (place / left).parent.mkdir(parents=True, exist_ok=True)
        (place / left).write_text(json.dumps({"slices": [], "policies": []}))
    age(place, 48)
    return place


PLANTED = [
    "policies",
    "policies/training-xy",
    SCRATCH_DIRECTORY,
    "tables",
    "tables/messages",
    "tables/messages/run=old",
    "tables/ledger/_delta_log",
    "removals",
    "logs",
    "logs/old",
    "heads",
]
COMMANDS = {
    "gc": "gc --keep new --yes",
    "gc of weights": "gc --keep new --keep old --policies last --yes",
    "maintain": "maintain --retention-hours 0",
    "repair": "repair --deep --forget",
}


@pytest.mark.fault("paths", "a directory of a store is a link out of it", "nothing outside is deleted or written")
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("place", PLANTED)
def test_a_directory_that_is_a_link_is_not_followed(root, tmp_path, call, place, command):
    """All that was there is outside now, and would be found by who follows the link."""
    outside = tmp_path / "outside"
    shutil.move(root / place, outside)
    (root / place).symlink_to(outside)
    before = file_bytes(outside)
    assert before
    status, said = call(*command.split())
    assert file_bytes(outside) == before and outside.is_dir()
    assert "Traceback" not in said
    # Some of these a command has nothing to do with; whichever touches one says so.
    assert status == 0 or "symbolic link leads out of the store" in said


@pytest.mark.fault("paths", "a link out of the store where gc deletes", "the link is named")
@pytest.mark.parametrize("place", ["policies/training-xy", "logs/old", "tables/messages/run=old"])
def test_gc_says_which_link_it_does_not_follow(root, tmp_path, call, place):
    shutil.move(root / place, tmp_path / "outside")
    (root / place).symlink_to(tmp_path / "outside")
    status, said = call(*COMMANDS["gc"].split())
    assert status == 2 and str(root / place) in said and "remove the link" in said


@pytest.mark.fault("paths", "a file of a store is a link out of it", "each of eight uses is refused")
def test_a_file_that_is_a_link_is_neither_deleted_through_nor_written_to(root, tmp_path):
    precious = tmp_path / "precious.parquet"
    precious.write_text("precious")
    store = open_root(str(root))
    (root / "tables/x.parquet").symlink_to(precious)
    happened(f"a link to {precious.name}")
    uses = [(use, b"new") for use in (store.write, store.create, store.replace)]
    uses += [(use,) for use in (store.delete, store.remove_unneeded, store.remove_directory, store.read, store.exists)]
    for use, *content in uses:
        with pytest.raises(StoreError, match="symbolic link leads out of the store"):
            use("tables/x.parquet", *content)
    assert precious.read_text() == "precious"


def test_of_a_link_within_the_store_the_link_alone_is_removed(root):
    weights = file_bytes(root / "policies/training-xx")
    assert weights
    shutil.rmtree(root / "policies/training-xy")
    (root / "policies/training-xy").symlink_to(root / "policies/training-xx")
    open_store(root).policies.remove("training-xy")
    assert file_bytes(root / "policies/training-xx") == weights and not (root / "policies/training-xy").exists()
    store = open_root(str(root))
    (root / "link").symlink_to("policies")
    store.remove_directory("link")
    assert file_bytes(root / "policies/training-xx") == weights


def test_a_store_that_is_itself_behind_a_link_is_one(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    assert open_store(tmp_path / "link").ledger.entries() == open_store(root).ledger.entries()


@pytest.mark.fault("paths", "the place of a policy is a link out of the store", "refused")
def test_a_policy_is_not_published_through_a_link(root, tmp_path):
    """And no scratch directories are looked for behind one."""
    policies = Policies(open_root(str(root)))
    (outside := tmp_path / "outside").mkdir()
    (outside / "left").mkdir()
    scratch = policies.scratch("training-xy")
    shutil.copytree(root / "policies/training-xy", scratch, dirs_exist_ok=True)
    (scratch / "manifest.json").unlink()
    (root / "policies/new").symlink_to(outside)
    happened("policies/new is a link")
    with pytest.raises(StoreError, match="symbolic link leads out of the store"):
        policies.publish(scratch, "new")
    shutil.rmtree(root / SCRATCH_DIRECTORY)
    (root / SCRATCH_DIRECTORY).symlink_to(outside)
    with pytest.raises(StoreError, match="symbolic link"):
        policies.scratch("other")
    with pytest.raises(StoreError, match="symbolic link"):
        ScratchDirectories(root / SCRATCH_DIRECTORY).make("other")
    assert [path.name for path in outside.rglob("*")] == ["left"]


@pytest.mark.fault("paths", "a service's log is a link out of the store", "refused")
def test_no_log_is_written_through_a_link(root, tmp_path):
    config = RunConfig.model_validate({"name": "old", "store": str(root)})
    assert log_directory(config) == root / "logs/old"
    precious = tmp_path / "precious"
    precious.write_text("precious")
    os.symlink(precious, root / "logs/old/learner.log")
    happened("logs/old/learner.log is a link")
    with pytest.raises(ServiceFailed, match=r"learner\.log is a symbolic link"), Supervisor("old", root / "logs/old"):
        pass
    shutil.move(root / "logs", tmp_path / "logs")
    (root / "logs").symlink_to(tmp_path / "logs")
    with pytest.raises(StoreError, match="symbolic link leads out"):
        log_directory(config)
    (root / "sources").mkdir()
    (root / "sources/words.json").symlink_to(precious)
    with pytest.raises(StoreError, match="symbolic link leads out"):
        sources_directory(str(root))
    assert precious.read_text() == "precious"
