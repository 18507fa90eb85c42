"""Policies of families whose training only CUDA serves reach vLLM's own class of the model value for value.

An engine on a CPU computes cohere2 and deepseek_v3 otherwise, and loads sinks and experts of gpt_oss once: no run shows
their weights there. The class that fills an engine's parameters is the same on every device.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flows.exchange.export import copy_weights
from storage.store import open_store
from tests.fixtures.family_models import quantise, tiny_family
from tests.fixtures.learner_steps import loaded_trainer, step_batches, train_step
from tests.fixtures.policies import imported

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(600)]

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LATENT = {"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}
EXPERTS = "experts.routed_experts."
FUSED = {
    "w13_weight": ("gate_up_proj", (0, 2, 1)),
    "w13_bias": ("gate_up_proj_bias", (0, 1)),
    "w2_weight": ("down_proj", (0, 2, 1)),
    "w2_bias": ("down_proj_bias", (0, 1)),
}
"""Of gpt_oss, whose matrices have inputs before outputs and all experts in one, as vLLM's have not and have."""


def parameter_of(name, weights):
    """Return a parameter of vLLM's class by the weights of a policy: names as its source has them."""
    name = name.replace("model.embedding.", "model.embed_tokens.").replace(".attn.", ".self_attn.")
    for joined, parts in (JOINED | LATENT).items():
        if f".{joined}." in name and name not in weights:
            return torch.cat([weights[name.replace(joined, part)] for part in parts])
    stem, _, kind = name.partition(EXPERTS)
    if not kind:
        return weights[name]
    if f"{stem}experts.gate_up_proj" in weights:
        part, order = FUSED[kind]
        return weights[f"{stem}experts.{part}"].permute(order)
    parts = ("gate_proj", "up_proj") if kind == "w13_weight" else ("down_proj",)
    experts = range(sum(name.startswith(f"{stem}experts.") and "down" in name for name in weights))
    return torch.stack([torch.cat([weights[f"{stem}experts.{i}.{part}.weight"] for part in parts]) for i in experts])


def loaded_by_vllm(place, *policies):
    """Return, for each policy in turn, the parameters of vLLM's class, and the checksums of engine and files."""
    place.mkdir()
    argv = [sys.executable, "-m", "tests.fixtures.engine_class", place, policies[0], *policies]
    done = subprocess.run(list(map(str, argv)), env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    parameters = [load_file(place / f"{number}.safetensors") for number in range(len(policies))]
    return parameters, json.loads((place / "sums.json").read_text())


@pytest.mark.parametrize("family", ["cohere2", "deepseek_v3", "gpt_oss"])
def test_weights_go_through_import_training_engine_and_export(family, world, tmp_path):
    source = tiny_family(tmp_path / "source", family)
    if family == "gpt_oss":
        quantise(source, "mxfp4")
    first, store = imported(source, tmp_path / "p0"), open_store(tmp_path / "store")
    train_step(loaded_trainer(world, first, learning_rate=1e-2), 0, tmp_path, step_batches(1)[0])
    scratch = store.policies.scratch("p1")
    shutil.copytree(tmp_path / "p1", scratch, dirs_exist_ok=True)
    store.policies.publish(scratch, "p1")
    trained = store.policies.directory("p1")
    before, after = (load_file(policy / "model.safetensors") for policy in (first, trained))
    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in after.items()}
    assert sum(not torch.equal(before[name].float(), value) for name, value in after.items()) > len(after) / 2

    loads, sums = loaded_by_vllm(tmp_path / "vllm", first, trained, first)
    assert sums[0] == sums[2] != sums[1] and all(engine == files for engine, files in sums)
    for parameters, weights in zip(loads, (before, after, before), strict=True):
        for name, parameter in parameters.items():
            assert torch.equal(parameter, parameter_of(name, weights).float()), name

    copy_weights(store, "p1", tmp_path / "exported", force=False)
    again = imported(tmp_path / "exported", tmp_path / "again")
    assert {*after} == {*load_file(again / "model.safetensors")}
    expected = AutoModelForCausalLM.from_pretrained(trained).state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(again).state_dict().items():
        assert torch.equal(value, expected[name]), name
