"""Samples of a packed row do not see each other, bad directories say why."""

import json
import shutil
from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from configs.training import TrainingConfig
from tasks.learner.model import run_row
from tasks.learner.protocol import LearnerError
from tasks.learner.recompute import recompute_layers
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.packed import row_of, sample
from tests.fixtures.policies import CPU, assert_near, flat_gradient, policy_of

pytestmark = pytest.mark.engine

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
"""Of models of other families."""
SAMPLES = [sample("a", 9, 1), sample("b", 5, 2, temperature=0.7), sample("c", 14, 3)]


def logprobs(policy, samples):
    with torch.no_grad():
        values, entropies = run_row(policy, row_of(samples), CPU)
    return values, entropies


def test_packed_equals_alone(exact_policy):
    together, entropies = logprobs(exact_policy, SAMPLES)
    alone = [logprobs(exact_policy, [each]) for each in SAMPLES]
    assert_near(together, torch.cat([values for values, _ in alone]), 1e-12)
    assert_near(entropies, torch.cat([values for _, values in alone]), 1e-12)


def of_whole_logits(model, row):
    """Return the log-probs of a row's weighted tokens by the logits that transformers computes of the row."""
    token_ids, positions, temperatures = map(
        torch.from_numpy, (row.token_ids, row.positions(), row.streams["temperatures"])
    )
    with torch.no_grad():
        logits = model(token_ids[None], position_ids=positions[None]).logits[0, row.weighted - 1]
    scaled = (logits / temperatures[row.weighted, None]).log_softmax(-1)
    return scaled.gather(1, token_ids[row.weighted, None]).squeeze(1)


def test_logprobs_equal_the_model_s_own(world, model_directory):
    from transformers import AutoModelForCausalLM

    policy = policy_of(model_directory, logprob_chunk=3)
    expected = of_whole_logits(AutoModelForCausalLM.from_pretrained(model_directory), row_of(SAMPLES[1:2]))
    assert_near(logprobs(policy, SAMPLES[1:2])[0], expected, 1e-5)


@pytest.mark.parametrize(("asked", "chunk"), [(None, 1024), (3, 3)])
def test_the_chunk_is_the_config_s_or_follows_from_the_model(world, model_directory, asked, chunk):
    assert policy_of(model_directory, logprob_chunk=asked).chunk == chunk


@pytest.mark.parametrize(("every", "recomputed"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (9, [0])])
@pytest.mark.parametrize(("kind", "offload"), [(True, False), (True, True), ("selective", False)])
@pytest.mark.essential
def test_recomputing_every_nth_layer_changes_no_bit(world, tmp_path, every, recomputed, kind, offload):
    directory = tiny_qwen3(tmp_path / "deep", hidden=32, layers=5)
    plain, calls, products = gradient_and_layer_calls(directory)
    assert calls == dict.fromkeys(range(5), 1)
    settings = {"gradient_checkpointing": kind, "checkpoint_every": every, "offload_activations": offload}
    found, calls, more = gradient_and_layer_calls(directory, **settings)
    assert calls == {layer: 2 if layer in recomputed else 1 for layer in range(5)}
    assert more == products if kind == "selective" else more > products
    assert plain.abs().max() > 0
    assert torch.equal(found, plain)


def gradient_and_layer_calls(directory, **settings):
    """Return the gradient, how often the code of each layer's attention ran for it, and the operations of products."""
    policy = policy_of(directory, **settings)
    calls = Counter()
    for number, layer in enumerate(policy.causal.model.layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, number=number: calls.update([number]))
    with FlopCounterMode(display=False) as counter:
        values, entropies = run_row(policy, row_of(SAMPLES), CPU)
        (values.sum() + entropies.sum()).backward()
    return flat_gradient(policy), calls, counter.get_total_flops()


@pytest.mark.essential
def test_what_recomputed_layers_begin_from_is_what_is_offloaded(world, tmp_path, monkeypatch):
    """On the CPU nothing is moved. So the transfer to the host is replaced by one that counts; the numbers stay."""
    from torch.autograd import graph
    from transformers import modeling_utils

    sizes = []

    class Counting(graph.saved_tensors_hooks):
        def __init__(self, **_):
            super().__init__(lambda tensor: sizes.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor)

    monkeypatch.setattr(modeling_utils, "save_on_cpu", Counting)
    policy = policy_of(tiny_qwen3(tmp_path / "deep", hidden=32, layers=5))
    settings = TrainingConfig(gradient_checkpointing=True, checkpoint_every=2, offload_activations=True)
    recompute_layers(policy.causal, policy.layers(), settings, torch.device("cuda"))
    values, _ = run_row(policy, row_of(SAMPLES), CPU)
    hidden = [size for size in sizes if size[-1:] == (32,)]
    assert hidden == [(1, 28, 32)] * 3, "one hidden state for each of layers 0, 2 and 4, and no weight"
    values.sum().backward()


def test_bfloat16_computes_in_half_from_float32_masters(world, model_directory):
    policy, exact = (policy_of(model_directory, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    difference = (logprobs(policy, SAMPLES)[0] - logprobs(exact, SAMPLES)[0]).abs().max()
    assert 1e-6 < difference < 0.1


def test_tied_head(world, tmp_path):
    policy = policy_of(tiny_qwen3(tmp_path / "tied", hidden=32, layers=1, tied=True))
    values, _ = run_row(policy, row_of(SAMPLES), CPU)
    values.sum().backward()
    names = [name for name, _ in policy.causal.named_parameters()]
    assert "lm_head.weight" not in names
    # Rows of tokens that are in no sample get gradient only through the head.
    embedding = policy.causal.get_input_embeddings().weight.grad
    assert embedding[300:].abs().max() > 0


def saved_policy(causal_class, config, directory, **training):
    torch.manual_seed(0)
    causal_class(config).save_pretrained(directory)
    return policy_of(directory, **training)


def test_another_family(world, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_hidden_layers=2)
    policy = saved_policy(LlamaForCausalLM, config, tmp_path)
    alone = torch.cat([logprobs(policy, [each])[0] for each in SAMPLES])
    assert_near(logprobs(policy, SAMPLES)[0], alone, 1e-5)


def without_a_tensor(directory):
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def cut_off(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def of_no_family(directory):
    (directory / "config.json").write_text(json.dumps({"model_type": "no-such-family"}))


def with_code(directory):
    """Code beside the weights, which the config names: who runs it leaves a file."""
    config = json.loads((directory / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text(f"open({str(directory / 'ran')!r}, 'w')")


def pickled(directory):
    """Weights as a pickle, which does what it likes when it is read."""
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    torch.save(Ran(directory / "ran"), directory / "pytorch_model.bin")


class Ran:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("plant", [with_code, pickled])
def test_nothing_in_a_directory_of_weights_is_run(world, model_directory, tmp_path, plant):
    directory = shutil.copytree(model_directory, tmp_path / "policy")
    plant(directory)
    with pytest.raises(LearnerError, match="cannot be loaded"):
        policy_of(directory)
    assert not (directory / "ran").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is not a model directory"),
        (lambda directory: (directory / "model.safetensors").unlink(), "is not a model directory"),
        (lambda directory: (directory / "config.json").unlink(), "is not a model directory"),
        (lambda directory: (directory / "config.json").write_text("{"), "cannot be loaded"),
        (of_no_family, "cannot be loaded"),
        (cut_off, "cannot be loaded"),
        (without_a_tensor, "up_proj"),
    ],
)
def test_a_bad_directory_says_why(world, model_directory, tmp_path, damage, message):
    directory = shutil.copytree(model_directory, tmp_path / "policy")
    policy_of(directory)
    damage(directory)
    with pytest.raises(LearnerError, match=message) as caught:
        policy_of(directory)
    assert str(directory) in str(caught.value)
