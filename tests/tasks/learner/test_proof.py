"""Models of many families compute the same packed as alone; what is planted to leak or to be left out is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from configs.training import TrainingConfig
from tasks.learner import attention
from tasks.learner.context_parallel import ContextGroup
from tasks.learner.distributed import ALONE
from tasks.learner.model import load_policy, run_row
from tasks.learner.proof import LONGEST, SHORTEST, proof_length
from tasks.learner.protocol import LearnerError
from tests.fixtures.family_models import FAMILIES, WITHOUT_LORA, tiny_family
from tests.fixtures.learner_steps import loaded_trainer
from tests.fixtures.packed import row_of, sample
from tests.fixtures.policies import CPU, assert_near, policy_of

pytestmark = pytest.mark.engine

ESSENTIAL = ("mistral", "gemma2", "gpt_oss", "qwen3_5_text", "nemotron_h", "deepseek_v3")
MARKED = [pytest.param(name, marks=[pytest.mark.essential] * (name in ESSENTIAL)) for name in FAMILIES]


@pytest.mark.parametrize("family", MARKED)
def test_a_family_is_computed_alike_packed_and_alone(family, world, tmp_path):
    policy = policy_of(tiny_family(tmp_path, family))
    assert sum(parameter.numel() for parameter in policy.parameters()) <= 2e6
    assert policy.proof["proof_logprobs"] < 1e-6 and policy.proof["proof_gradient"] < 1e-5
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in WITHOUT_LORA])
def test_an_adapter_is_proven(family, world, tmp_path):
    trainer = loaded_trainer(world, tiny_family(tmp_path, family), lora={"rank": 4, "alpha": 8.0})
    proof = trainer._loaded.policy.proof
    assert proof["proof_logprobs"] < 1e-6 and 0 < proof["proof_gradient"] < 1e-5


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("gemma3_text", (True, "selective")),
        ("gpt_oss", (True, "selective")),
        ("qwen3_5_text", (True, "selective")),
    ],
)
def test_recomputed_layers_have_the_same_gradient(family, kinds, world, tmp_path):
    """A layer with a state reads the borders of its row again in the backward pass."""
    directory, samples = tiny_family(tmp_path, family), [sample("a", 90, 1), sample("b", 40, 2)]
    gradients = []
    for recompute in (False, *kinds):
        policy = policy_of(directory, gradient_checkpointing=recompute)
        if family == "gpt_oss":
            policy.causal.set_experts_implementation("grouped_mm")  # as on CUDA: biases are added in place
        run_row(policy, row_of(samples), CPU)[0].sum().backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True))


def test_what_segments_begin_with_alike_is_computed_once(world, tmp_path):
    """Windows, sinks and states hold where samples share their prompt."""
    prompt = sample("p", 70, 1).token_ids
    samples = [sample(name, 100, seed) for seed, name in enumerate("abc")]
    for each in samples:
        each.token_ids[:70] = prompt
    for family in ("gpt_oss", "qwen3_5_text"):
        policy = policy_of(tiny_family(tmp_path / family, family))
        values = []
        for policy.shares_prefixes in (True, False):
            assert row_of(samples).shared
            policy.zero_grad()
            logprobs, _ = run_row(policy, row_of(samples), CPU)
            logprobs.sum().backward()
            values.append([logprobs.detach(), *(parameter.grad for parameter in policy.parameters())])
        assert_near(values[0][0], values[1][0], 1e-5)
        for once, twice in zip(*values, strict=True):
            assert_near(once, twice, 1e-5 * max(1.0, float(twice.abs().max())))


def without_window(monkeypatch):
    change_scoring(monkeypatch, window=None)


def without_sinks(monkeypatch):
    change_scoring(monkeypatch, sinks=None)


def without_softcap(monkeypatch):
    change_scoring(monkeypatch, softcap=None)


def change_scoring(monkeypatch, **changes):
    plain = attention._attend

    def attend(query, key, value, scoring):
        return plain(query, key, value, scoring._replace(**changes))

    monkeypatch.setattr(attention, "_attend", attend)


def with_carried_state(monkeypatch):
    monkeypatch.setattr("tasks.learner.model.run_by_segment", lambda *_: 0)


def without_cap_of_the_head(monkeypatch):
    monkeypatch.setattr("tasks.learner.model.capped_kernels", lambda kernels, _: kernels)


def without_gradient_of_keys(monkeypatch):
    plain = attention._attend

    def attend(query, key, value, scoring):
        return plain(query, key.detach(), value, scoring)

    monkeypatch.setattr(attention, "_attend", attend)


@pytest.mark.parametrize(
    ("family", "plant", "part"),
    [
        ("gemma3_text", without_window, "Gemma3Attention"),
        ("gpt_oss", without_sinks, "GptOssAttention"),
        ("gemma2", without_softcap, "Gemma2Attention"),
        ("gemma2", without_cap_of_the_head, "output head"),
        ("qwen3_5_text", with_carried_state, "Qwen3_5GatedDeltaNet"),
        ("nemotron_h", with_carried_state, "NemotronHMamba2Mixer"),
        ("lfm2", with_carried_state, "Lfm2ShortConv"),
        ("qwen3_next", with_carried_state, "Qwen3NextGatedDeltaNet"),
    ],
)
@pytest.mark.essential
def test_what_is_left_out_is_refused_with_its_layer(family, plant, part, world, tmp_path, monkeypatch):
    directory = tiny_family(tmp_path, family)
    # Experts in half precision hide a sink, as rounding gives tokens other ones.
    precisions = ("float32", "bfloat16")[: 1 if family == "gpt_oss" else 2]
    for dtype in precisions:
        policy_of(directory, dtype=dtype)
    plant(monkeypatch)
    for dtype in precisions:
        with pytest.raises(LearnerError, match=rf"its (layer )?{part}.* packed row"):
            policy_of(directory, dtype=dtype)


@pytest.mark.nightly
def test_a_window_of_4096_tokens_is_proven(world, tmp_path, monkeypatch):
    directory = tiny_family(tmp_path, "mistral", sliding_window=4096, max_position_embeddings=8192)
    assert policy_of(directory).proof["proof_logprobs"] < 1e-6
    without_window(monkeypatch)
    with pytest.raises(LearnerError, match=r"its layer MistralAttention.* packed row"):
        policy_of(directory)


def test_a_wrong_gradient_is_refused(world, tmp_path, monkeypatch):
    without_gradient_of_keys(monkeypatch)
    with pytest.raises(LearnerError, match="gradients by"):
        policy_of(tiny_family(tmp_path, "llama"))


def test_a_head_that_nothing_here_knows_is_refused(world, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def scaled(self, **inputs):
        out = plain(self, **inputs)
        return out.__class__(logits=2 * out.logits)

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(LearnerError, match="its output head"):
        policy_of(tiny_family(tmp_path, "llama"))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, SHORTEST),
        ({"sliding_window": 16}, SHORTEST),
        ({"sliding_window": 512}, 544),
        ({"attention_chunk_size": 1024}, 1056),
        ({"sliding_window": 512, "max_position_embeddings": 300}, 300),
        ({"sliding_window": 4096}, LONGEST),
        ({"sliding_window": LONGEST}, SHORTEST),
        ({"sliding_window": None}, SHORTEST),
    ],
)
def test_the_text_is_longer_than_the_window(config, length):
    assert proof_length(SimpleNamespace(**config)) == length


def test_layers_with_a_state_are_neither_compiled_nor_shared_by_ranks(world, tmp_path, monkeypatch):
    directory = tiny_family(tmp_path, "qwen3_5_text")
    shared = replace(ALONE, context=ContextGroup(None, 0, 2))
    with pytest.raises(LearnerError, match=r"learner\.context_parallel: 1 layers of the model carry a state"):
        load_policy(directory, TrainingConfig(), CPU, world=shared)
    monkeypatch.setattr("tasks.learner.model.has_kernel", lambda *_: True)
    with pytest.raises(LearnerError, match=r"training\.compile is true, but the model has layers with a state"):
        policy_of(directory, compile=True)
