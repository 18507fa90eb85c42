"""Checkpoints in mxfp4 and fp8 are imported in bfloat16, with the values of their formats, and trained like others."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from configs.run import RunConfig
from tasks.inference.engine.read_back import sum_files
from tasks.learner.protocol import LearnerError
from tasks.training.policy import PolicyImportInputs, policy_import
from tests.fixtures.family_models import quantise, tiny_family
from tests.fixtures.policies import policy_of

pytestmark = pytest.mark.engine


def imported(source, target):
    """Import a policy with a learner that measures nothing."""
    state = {"weights_sha256": "", "probe_token_ids": [1, 2], "proof_length": 0}
    client = SimpleNamespace(state=lambda: state, probe=lambda tokens: [0.0, -1.0])
    learner = SimpleNamespace(turn=nullcontext, load_fresh=lambda *_: client)
    policy_import(PolicyImportInputs(str(source), target, "k", learner), RunConfig(name="run"))
    return target


def by_hand(weights, name):
    """The values of a quantised matrix by its format's definition."""
    if name + "_blocks" in weights:  # E2M1 pairs, the lower half first; E8M0: 2 to the power of a byte less 127
        codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        blocks, scales = weights[name + "_blocks"].int(), weights[name + "_scales"].float() - 127
        pairs = torch.stack([codes[blocks & 15], codes[blocks >> 4]], -1).flatten(-2)
        return (pairs * scales.exp2()[..., None]).flatten(-2).mT
    scales = weights[name + "_scale_inv"].repeat_interleave(64, 0).repeat_interleave(64, 1)
    values = weights[name].float()
    return values * scales[: values.shape[0], : values.shape[1]]


@pytest.mark.essential
@pytest.mark.parametrize(
    ("family", "method", "matrix"),
    [
        ("gpt_oss", "mxfp4", "model.layers.1.mlp.experts.gate_up_proj"),
        ("qwen3_moe", "fp8", "model.layers.1.mlp.experts.3.gate_proj.weight"),
    ],
)
def test_an_import_has_the_values_of_the_format_under_plain_names(family, method, matrix, world, tmp_path):
    source = tiny_family(tmp_path / "a", family)
    plain = {name: value.shape for name, value in load_file(source / "model.safetensors").items()}
    quantised = load_file(quantise(source, method) / "model.safetensors")
    target = imported(source, tmp_path / "made")
    weights = load_file(target / "model.safetensors")
    assert {name: value.shape for name, value in weights.items()} == plain
    assert torch.equal(weights[matrix], by_hand(quantised, matrix).bfloat16())
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    assert policy_of(target, policy_dtype="bfloat16").proof["proof_logprobs"] < 1e-6
    assert sum_files(target, "bfloat16", own_head=True).num_values == sum(value.numel() for value in weights.values())


def test_what_cannot_be_written_is_no_policy(tmp_path):
    source = quantise(tiny_family(tmp_path / "a", "llama"), "fp8")
    config = json.loads((source / "config.json").read_text())
    config["model_type"] = "unheard_of"
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(LearnerError, match="could not be written in bfloat16"):
        imported(source, tmp_path / "made")
