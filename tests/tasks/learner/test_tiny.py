"""The small model directory: deterministic, understood by the renderer, stops where a turn ends."""

import json

import pytest

from tasks.learner.tiny import byte_tokenizer, tiny_qwen3

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def tokenizer(directory):
    from renderers.base import load_tokenizer

    return load_tokenizer(str(directory))


def test_same_seed_same_bytes_and_another_seed_other_bytes(tmp_path):
    import torch

    before = torch.get_rng_state()
    first, again, other = (
        tiny_qwen3(tmp_path / name, hidden=32, layers=1, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert torch.equal(before, torch.get_rng_state())
    names = sorted(path.name for path in first.iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    assert [(first / name).read_bytes() for name in names] == [(again / name).read_bytes() for name in names]
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_config_is_untied_float32_and_stops_at_the_turn_end(directory, tokenizer):
    from safetensors import safe_open

    config = json.loads((directory / "config.json").read_text())
    generation = json.loads((directory / "generation_config.json").read_text())
    assert (config["tie_word_embeddings"], config["dtype"], config["vocab_size"]) == (False, "float32", 512)
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    with safe_open(directory / "model.safetensors", "np") as weights:
        sizes = {name: weights.get_tensor(name).size for name in weights.keys()}  # noqa: SIM118
    assert "lm_head.weight" in sizes and sum(sizes.values()) == 820_608


def test_bytes_are_tokens(tokenizer):
    text = "aß世 \n\t\x00"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 512
    assert all(tokenizer.convert_ids_to_tokens(index) is not None for index in range(512))


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="need 265"):
        byte_tokenizer(264, 128)
