"""The digest of weights: by hand, over any number of files, blind to optimizer state, awake to every byte."""

import hashlib

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks.learner.digest import tensors_sha256, weights_sha256

TENSORS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([1.5], np.float32)}


@pytest.fixture
def directory(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_by_hand(directory):
    text = b'["a", "F32", [1]]\n' + TENSORS["a"].tobytes() + b'["b", "F32", [2, 3]]\n' + TENSORS["b"].tobytes()
    assert weights_sha256(directory) == tensors_sha256(TENSORS) == hashlib.sha256(text).hexdigest()


def test_files_and_optimizer_state_do_not_matter(directory, tmp_path_factory):
    other = tmp_path_factory.mktemp("sharded")
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, other / f"model-{name}.safetensors", {"format": "pt"})
    save_file({"exp_avg.a": TENSORS["a"]}, other / "optimizer.safetensors")
    assert weights_sha256(other) == weights_sha256(directory)


@pytest.mark.parametrize(
    "tensors",
    [
        {**TENSORS, "a": np.array([1.25], np.float32)},
        {**TENSORS, "b": TENSORS["b"].reshape(3, 2)},
        {**TENSORS, "a": TENSORS["a"].view(np.int32)},
        {"b": TENSORS["b"], "c": TENSORS["a"]},
    ],
    ids=["value", "shape", "type", "name"],
)
def test_every_change_shows(directory, tmp_path_factory, tensors):
    other = tmp_path_factory.mktemp("changed")
    save_file(tensors, other / "model.safetensors")
    assert weights_sha256(other) != weights_sha256(directory)


def test_missing_damaged_and_doubled(directory, tmp_path_factory):
    with pytest.raises(ValueError, match="no weights"):
        weights_sha256(tmp_path_factory.mktemp("empty"))
    save_file({"a": TENSORS["a"]}, directory / "more.safetensors")
    with pytest.raises(ValueError, match=r"'a' is in model\.safetensors and more\.safetensors"):
        weights_sha256(directory)
    (directory / "more.safetensors").unlink()
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    for size in (4, 20, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"not a complete|cut off"):
            weights_sha256(directory)
