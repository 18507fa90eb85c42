"""The checksum of weights: the same for files and tensors in every precision, another for every other weight."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tasks.inference.engine.checks import EngineMismatch, check_serving, check_weights, tolerance
from tasks.inference.engine.read_back import recorded_sum, sum_files
from tasks.learner.tiny import tiny_qwen3
from tasks.runtime.weights_sum import PRECISIONS, SUMS_FILE, WeightsSum, add_sums, sum_tensor
from tests.fixtures.hosts import ENGINE, engine_of
from tests.tasks.inference.engine.probes import flip, policy_row


def slow(weights, dtype):
    """The definition, value by value."""
    patterns = [
        int.from_bytes(value.reshape(1).view(torch.uint8).numpy().tobytes(), "little")
        for weight in weights
        for value in weight.to(getattr(torch, dtype)).reshape(-1)
    ]
    return WeightsSum(len(patterns), sum(patterns) % 2**64, sum(each * each for each in patterns) % 2**64)


def record(weights, directory, dtype):
    """Write what a learner records of weights."""
    sums = {name: sum_tensor(weight, dtype) for name, weight in weights.items()}
    (directory / SUMS_FILE).write_text(json.dumps({dtype: sums}))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    stored=st.sampled_from(["float32", "bfloat16", "float16"]),
    dtype=st.sampled_from(PRECISIONS),
    tied=st.booleans(),
)
def test_files_and_tensors_have_the_sum_of_the_definition(tmp_path_factory, seed, stored, dtype, tied):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"model.embed_tokens.weight": (7, 4), "model.layers.0.mlp.weight": (3, 5), "model.norm.weight": (4,)}
    if not tied:
        sizes["lm_head.weight"] = (7, 4)
    weights = {
        name: (torch.randn(size, generator=generator) * 10 ** torch.randn(size, generator=generator)).to(
            getattr(torch, stored)
        )
        for name, size in sizes.items()
    }
    directory = tmp_path_factory.mktemp("weights")
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"vocab_size": 7, "tie_word_embeddings": tied}))
    expected = slow(list(weights.values()), dtype)
    assert sum_files(directory, dtype, own_head=False) == expected
    both = [*weights.values(), *([weights["model.embed_tokens.weight"]] if tied else [])]
    assert sum_files(directory, dtype, own_head=True) == slow(both, dtype)
    summed = add_sums(sum_tensor(weight, dtype) for weight in weights.values())
    assert summed == expected
    record(weights, directory, dtype)
    assert all(
        recorded_sum(directory, dtype, own_head=own) == sum_files(directory, dtype, own_head=own) for own in (0, 1)
    )
    assert recorded_sum(directory, "another", own_head=False) is None


def test_every_flipped_bit_changes_it():
    weight = torch.arange(1, 9, dtype=torch.float32)
    whole = sum_tensor(weight, "float32")
    for bit in range(8 * 32):
        flipped = weight.view(torch.int32).clone()
        flipped[bit // 32] ^= torch.tensor(-(2**31) if bit % 32 == 31 else 1 << bit % 32, dtype=torch.int32)
        assert sum_tensor(flipped.view(torch.float32), "float32") != whole


def test_a_precision_that_is_not_known_is_not_compared(tmp_path):
    save_file({"model.norm.weight": torch.zeros(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    assert sum_files(tmp_path, "bfloat16", own_head=False) is None


@pytest.mark.engine
@pytest.mark.essential
@pytest.mark.parametrize("share", [0.01, 0.0], ids=["one weight in a hundred", "one weight"])
def test_an_engine_with_flipped_bits_is_caught(small_engine, models, tmp_path, share):
    row = policy_row(f"flipped-{share}", models["b"])
    small_engine.serve(row["policy_key"], models["b"])
    assert check_weights(small_engine, row, models["b"]) is True
    small_engine.serve(row["policy_key"], flip(models["b"], tmp_path / "flipped", share))
    assert check_serving(small_engine, row, ENGINE) < 1e-3  # the probe does not see it
    with pytest.raises(EngineMismatch, match=r"the checksum of its \d+ values is not that of the policy"):
        check_weights(small_engine, row, models["b"])


@pytest.mark.engine
def test_an_engine_in_8_bits_says_the_weights_that_it_quantised(tmp_path):
    sizes = {"hidden": 128, "heads": 2, "kv_heads": 1, "layers": 2}
    models = {key: tiny_qwen3(tmp_path / key, **sizes, seed=seed) for seed, key in enumerate("ab")}
    config = ENGINE.model_copy(update={"quantization": "fp8", "dtype": "bfloat16"})
    with engine_of(models["a"], tmp_path / "report.json", config) as engine:
        for key, directory in models.items():
            row = policy_row(key, directory)
            engine.serve(key, directory)
            assert check_weights(engine, row, directory) is True
            assert 1e-3 < check_serving(engine, row, config) < tolerance(config)
        weights = load_file(models["b"] / "model.safetensors")
        weights["model.layers.1.mlp.down_proj.weight"][3, 5] += 0.01
        save_file(weights, models["b"] / "model.safetensors", {"format": "pt"})
        with pytest.raises(EngineMismatch, match="is not that of the policy"):
            check_weights(engine, row, models["b"])


@pytest.mark.engine
def test_files_that_are_not_what_the_learner_had_are_caught(small_engine, models, tmp_path):
    spoilt = flip(models["b"], tmp_path / "spoilt", 0.0)
    small_engine.serve("spoilt", spoilt)
    row = policy_row("spoilt", models["b"])
    assert check_weights(small_engine, row, spoilt) is True, "of weights from elsewhere the files are all there is"
    record(load_file(models["b"] / "model.safetensors"), spoilt, "float32")
    with pytest.raises(EngineMismatch, match="it holds other weights"):
        check_weights(small_engine, row, spoilt)


@pytest.mark.engine
def test_an_engine_that_kept_old_weights_is_caught(small_engine, models, monkeypatch):
    small_engine.serve("old-a", models["a"])
    monkeypatch.setattr(small_engine, "_call_workers", lambda *_, **__: None)
    small_engine.serve("old-b", models["b"])
    with pytest.raises(EngineMismatch, match="it holds other weights"):
        check_weights(small_engine, policy_row("old-b", models["b"]), models["b"])


@pytest.mark.engine
def test_an_engine_that_cannot_say_its_checksum_is_probed_alone(small_engine, models, monkeypatch):
    small_engine.serve("mute", models["a"])
    row = policy_row("mute", models["a"])
    request = small_engine._request
    # As an engine of others answers, which knows vLLM's own routes alone.
    monkeypatch.setattr(
        small_engine, "_request", lambda method, path, **named: request(method, path.replace("_sum", ""), **named)
    )
    assert check_weights(small_engine, row, models["a"]) is False
    assert small_engine.healthy()
