"""Checkpoints in mxfp4 and fp8 are imported in bfloat16, with the values of their formats, and trained like others."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from tasks.inference.engine.read_back import sum_files
from tasks.learner.protocol import LearnerError
from tasks.learner.quantised import from_fp8, from_mxfp4
from tests.fixtures.family_models import quantise, tiny_family
from tests.fixtures.policies import imported, policy_of

pytestmark = pytest.mark.engine


def test_values_of_mxfp4_are_those_of_its_specification():
    """Worked by hand: E2M1 has 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign, E8M0 is 2 to the power of a byte less 127."""
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, :4] = torch.tensor([0x21, 0x43, 0x65, 0xF7])
    blocks[0, 1, 0, 15] = 0x9A
    found = from_mxfp4(blocks, torch.tensor([[[128], [126]]], dtype=torch.uint8))
    assert found.shape == (1, 32, 2) and found.dtype == torch.bfloat16 and found.is_contiguous()
    assert found[0, :8, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -12.0]
    assert found[0, 30:, 1].tolist() == [-0.5, -0.25] and not found[0, 8:, 0].any()


def test_values_of_fp8_have_the_scale_of_their_block():
    matrix = torch.tensor([[1.0, 2.0, 448.0], [-0.5, 4.0, 1.5], [1.0, 1.0, 1.0]]).to(torch.float8_e4m3fn)
    found = from_fp8(matrix, torch.tensor([[2.0, 0.5], [3.0, 0.25]]), [2, 2])
    assert found.tolist() == [[2.0, 4.0, 224.0], [-1.0, 8.0, 0.75], [3.0, 3.0, 0.25]]
    assert found.dtype == torch.bfloat16


@pytest.mark.essential
@pytest.mark.parametrize(
    ("family", "method", "settings"),
    [("gpt_oss", "mxfp4", Mxfp4Config(dequantize=True)), ("qwen3_moe", "fp8", FineGrainedFP8Config(dequantize=True))],
)
def test_an_import_has_the_weights_that_transformers_reads(family, method, settings, world, tmp_path):
    plain = {
        name: value.shape
        for name, value in load_file(tiny_family(tmp_path / "a", family) / "model.safetensors").items()
    }
    source = quantise(tmp_path / "a", method)
    target = imported(source, tmp_path / "made")
    weights = load_file(target / "model.safetensors")
    assert {name: value.shape for name, value in weights.items()} == plain
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    expected = AutoModelForCausalLM.from_pretrained(source, quantization_config=settings, dtype=torch.bfloat16)
    found = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    for (name, value), other in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    policy = policy_of(target, policy_dtype="bfloat16")
    assert policy.proof["proof_logprobs"] < 1e-6
    assert sum_files(target, "bfloat16", own_head=True).num_values == sum(value.numel() for value in weights.values())


def test_what_cannot_be_written_is_no_policy(tmp_path):
    source = quantise(tiny_family(tmp_path / "a", "llama"), "fp8")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(LearnerError, match="could not be written in bfloat16"):
        imported(source, tmp_path / "made")
