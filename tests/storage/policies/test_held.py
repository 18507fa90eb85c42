"""Policies in the machine's memory: handed out before they are published, and gone when nobody needs them."""

import pytest

from storage.errors import PolicyAbsent
from storage.policies import manifest
from storage.policies.manifest import file_sha256, remember_digests
from storage.policies.store import Policies
from storage.refs import File
from storage.roots import open_root


@pytest.fixture
def memory(tmp_path):
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


@pytest.fixture
def policies(tmp_path):
    (tmp_path / "store").mkdir()
    return Policies(open_root(str(tmp_path / "store")))


def held(policies, key, memory):
    directory = policies.scratch(key, memory)
    (directory / "model.safetensors").write_text(key)
    policies.hold(directory, key)
    return directory


def there(memory):
    return {path.name.split("-")[0] for path in memory.glob("*/*")}


def test_what_is_held_is_handed_out_here_alone_until_it_is_published(policies, memory):
    directory = held(policies, "a", memory)
    found = policies.find("a")
    assert policies.directory("a") == directory and policies.is_in_memory(directory) and found is not None
    assert policies.read_file(found, found.files[0]) == b"a"
    others = Policies(policies._root)
    assert others.find("a") is None and policies.names() == others.names() == []
    published = policies.publish(directory, "a")
    assert (published.files, published.weights_sha256) == (found.files, found.weights_sha256)
    assert others.directory("a").joinpath("model.safetensors").read_text() == "a"
    assert policies.directory("a") == directory, "from where it is read faster"


def test_the_newest_two_stay_in_memory_once_they_are_published(policies, memory):
    for key in "abc":
        policies.publish(held(policies, key, memory), key)
    assert there(memory) == {"b", "c"}
    assert policies.directory("a").is_relative_to(policies._root.directory or "")
    policies.drop_held()
    assert there(memory) == set() and all(policies.directory(key) for key in "abc")


def test_what_is_not_published_yet_stays_however_many_there_are(policies, memory):
    directories = {key: held(policies, key, memory) for key in "abcd"}
    assert there(memory) == set("abcd")
    for key, directory in directories.items():
        policies.discard(directory)
        policies.publish(directory, key)
    held(policies, "e", memory)
    assert there(memory) == {"d", "e"}


def test_what_was_held_and_never_published_is_absent_afterwards(policies, memory):
    held(policies, "a", memory)
    policies.drop_held()
    with pytest.raises(PolicyAbsent):
        policies.directory("a")


def test_digests_are_taken_from_the_writer_until_a_file_changes(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_text("weights")
    right = file_sha256(file)
    manifest._hashed.clear()
    remember_digests(tmp_path, [File(file.name, 6, "of another size"), File("absent", 7, "of none")])
    assert file_sha256(file) == right
    remember_digests(tmp_path, [File(file.name, 7, "as told")])
    assert file_sha256(file) == "as told", "it was not read"
    before = file.stat().st_mtime_ns
    while file.stat().st_mtime_ns == before:  # some kernels count time in steps of 4 ms
        file.write_text("changed")
    assert file_sha256(file) not in ("as told", right)
