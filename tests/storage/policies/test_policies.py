"""A policy is a complete directory or absent, on a local disk and in an object store."""

import os
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from storage.errors import DamagedSlice, NoSpace, PolicyAbsent, PolicyConflict, StoreError
from storage.policies import store as policy_store
from storage.policies.manifest import MANIFEST
from storage.policies.store import Policies
from storage.roots import open_root
from tests.fixtures.dying import die_at
from tests.fixtures.faults import happened, spoil

FILES = {"config.json": "{}", "model.safetensors": "weights", "sub/tokenizer.json": "tokens"}


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.engine)])
def place(request, tmp_path):
    """A local root, and one in an object store."""
    if request.param == "s3":
        return open_root(request.getfixturevalue("s3_root"))
    (tmp_path / "a root").mkdir()
    return open_root(str(tmp_path / "a root"))


@pytest.fixture
def policies(place, tmp_path):
    return Policies(place, cache=tmp_path / "cache")


def write(directory, files=FILES):
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def publish(policies, files=FILES):
    return policies.publish(write(policies.scratch("k"), files), "k")


def read(directory):
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(directory).as_posix(): path.read_text() for path in files}


def test_what_is_published_is_there_for_everyone(policies, place, tmp_path):
    assert policies.find("k") is None
    scratch = write(policies.scratch("k"))
    policy = policies.publish(scratch, "k")
    assert not scratch.exists()
    assert [file.path for file in policy.files] == sorted(FILES)
    assert policies.find("k") == policy
    assert policies.names() == ["k"]
    again = Policies(place, cache=tmp_path / "another cache")
    assert read(again.directory("k", verify=True)) == FILES


def test_a_directory_from_elsewhere_is_copied(policies, tmp_path):
    source = write(tmp_path / "model")
    policies.publish(source, "k")
    assert read(source) == FILES
    assert read(policies.directory("k")) == FILES


def test_equal_weights_again_are_fine_and_others_are_not(policies):
    first = publish(policies)
    again = publish(policies, FILES | {"config.json": '{"library": "newer"}'})
    assert again == first
    with pytest.raises(PolicyConflict, match=first.weights_sha256) as caught:
        publish(policies, FILES | {"model.safetensors": "others"})
    assert caught.value.safe
    assert read(policies.directory("k", verify=True)) == FILES


def test_files_that_the_policy_lacks_are_refused(policies):
    publish(policies)
    with pytest.raises(PolicyConflict, match="is there without optimizer"):
        publish(policies, FILES | {"optimizer.safetensors": "moments"})
    assert read(policies.directory("k")) == FILES


def test_an_absent_policy_is_an_error(policies):
    with pytest.raises(PolicyAbsent, match="'nothing'"):
        policies.directory("nothing")


def test_nothing_cannot_be_published(policies):
    with pytest.raises(StoreError, match="holds no files"):
        policies.publish(policies.scratch("k"), "k")
    assert policies.names() == []


@pytest.mark.parametrize("key", ["", "a/b", "..", ".hidden", "a b"])
def test_a_key_is_a_name(policies, key):
    for use in (policies.find, policies.directory, policies.scratch):
        with pytest.raises(StoreError, match="no policy key"):
            use(key)


def published(directory, files=FILES):
    """Return the policies of a local root that has published one."""
    policies = Policies(open_root(str(directory)))
    publish(policies, files)
    return policies


def flip(file):
    """Change one bit, and nothing that a listing shows."""
    found, data = file.stat(), bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.fault(
    "weights", "one bit of a policy's file is flipped, its size and time as before", "refused with the file's name"
)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json"])
def test_one_flipped_bit_is_found_before_anything_is_loaded(tmp_path, name):
    policies = published(tmp_path, FILES | {"optimizer.safetensors": "moments"})
    file = policies.directory("k") / name
    time.sleep(0.02)  # a step of the file system's clock
    flip(file)
    happened(f"one bit of {name}")
    with pytest.raises(DamagedSlice, match=f"{name} is not the file that was written") as caught:
        policies.directory("k")
    assert "stagecoach repair --deep" in caught.value.do
    assert policies.directory("k", verify=False).is_dir()


@pytest.mark.fault("weights", "each bit of a manifest is flipped in turn", "refused")
def test_no_manifest_with_a_flipped_bit_is_read(tmp_path):
    policies = published(tmp_path)
    path = tmp_path / "policies/k" / MANIFEST
    good = path.read_bytes()
    for place in range(8 * len(good)):
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(StoreError):
            policies.find("k")
    happened(f"{8 * len(good)} bits")


@pytest.mark.fault("weights", "one bit of a local copy of an S3 policy is flipped", "it is fetched again")
@pytest.mark.engine
def test_a_flipped_bit_of_a_local_copy_is_mended_by_a_download(s3_root, tmp_path):
    policies = Policies(open_root(s3_root), cache=tmp_path / "cache")
    publish(policies)
    time.sleep(0.02)
    flip(policies.directory("k") / "model.safetensors")
    happened("one bit of model.safetensors")
    assert read(policies.directory("k")) == FILES


@pytest.mark.fault("weights", "weights are short, then gone", "refused with the size, then as missing")
def test_damage_is_found(tmp_path):
    policies = published(tmp_path)
    file = policies.directory("k") / "model.safetensors"
    file.write_text("weight")
    with pytest.raises(DamagedSlice, match="6 bytes instead of 7"):
        policies.directory("k")
    spoil(file, None)
    with pytest.raises(DamagedSlice, match="missing"):
        policies.directory("k")


@pytest.mark.fault("process", "publishing dies at each of its calls", "the policy is absent or complete")
def test_dying_anywhere_before_the_end_leaves_it_absent(policies):
    """Die before and after each call of the publication in turn; afterwards the policy is absent, or complete."""
    calls = [(policy_store, "synchronise"), (os, "rename"), (shutil, "copyfileobj")]
    died, moment = True, -1
    while died:
        moment += 1
        key, source = f"policy-{moment}", write(Path(tempfile.mkdtemp()))
        died = die_at(moment, partial(policies.publish, source, key), calls)
        if policies.find(key) is not None:
            assert read(policies.directory(key, verify=True)) == FILES
        assert policies.publish(source, key).files
    assert moment >= 6
    happened(f"died at {moment} moments")


@pytest.mark.fault("disk", "the disk is full as a policy is published", "the policy is absent; space makes it go on")
def test_a_full_disk_leaves_it_absent(policies, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    scratch = write(policies.scratch("k"))
    with monkeypatch.context() as patch:
        patch.setattr("storage.policies.store.manifest_text", full)
        with pytest.raises(NoSpace):
            policies.publish(scratch, "k")
    happened("ENOSPC as the manifest was written")
    assert policies.find("k") is None
    assert policies.publish(scratch, "k").files
