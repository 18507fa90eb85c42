"""What the engine is shown of a policy's directory, on hand-written files."""

import json
import struct

import pytest

from tasks.inference.engine.model_info import read
from tasks.inference.engine.weights_view import HEAD, WeightsUnusable, has_tied_head, read_weights, serving_view

EMBEDDING = bytes(range(24))


def write(path, tensors):
    """Write one-row float32 tensors as a safetensors file."""
    described, at = {}, 0
    for name, content in tensors.items():
        shape = [1, len(content) // 4]
        described[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps({"__metadata__": {"format": "pt"}, **described}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path):
    config = {"vocab_size": 6, "architectures": ["Some"], "tie_word_embeddings": True, "max_position_embeddings": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write(tmp_path / "model.safetensors", {"model.norm.weight": b"norm", "model.embed_tokens.weight": EMBEDDING})
    return tmp_path


def test_optimizer_state_is_not_shown(model):
    write(model / "optimizer.safetensors", {"model.norm.weight": b"else"})
    with serving_view(model) as view:
        assert sorted(path.name for path in view.iterdir()) == ["config.json", "model.safetensors"]
        assert (view / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert not view.exists()


def test_a_tied_head_gets_the_embedding_as_its_own(model):
    assert has_tied_head(model)
    tensors = dict(read_weights(model, untie=True))
    assert tensors[HEAD].numpy().tobytes() == EMBEDDING and len(tensors) == 3
    assert HEAD not in dict(read_weights(model, untie=False))
    write(model / "head.safetensors", {HEAD: EMBEDDING[::-1]})
    assert not has_tied_head(model)
    assert dict(read_weights(model, untie=True))[HEAD].numpy().tobytes() == EMBEDDING[::-1]


@pytest.mark.parametrize("keep", [0, 4, 30, -1])
def test_a_file_that_is_cut_off_is_refused(model, keep):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsUnusable, match=r"model\.safetensors"), serving_view(model):
        pass


def test_what_a_directory_says(model):
    info = read(model)
    assert (info.vocab_size, info.max_positions, info.tied) == (6, 9, True)
