"""Models with experts: computed as transformers does, stored under the names of the checkpoint, on one rank and two."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, conversion_mapping

from configs.training import LoraConfig, TrainingConfig
from tasks.learner import adapters
from tasks.learner.adapter_tools import merge
from tasks.learner.attention import ATTENTION
from tasks.learner.checkpoint import memory_sha256, own_tensors
from tasks.learner.digest import weights_sha256
from tasks.learner.distributed import ALONE
from tasks.learner.model import load_policy, run_row
from tasks.learner.protocol import LearnerError
from tasks.learner.shards import stored_shapes, write_shards
from tasks.learner.speed import training_cost
from tests.fixtures.family_models import ROUTED, tiny_family
from tests.fixtures.learner_steps import loaded_trainer, new_trainer, resume, train_step
from tests.fixtures.packed import batches, row_of, sample
from tests.fixtures.policies import CPU, assert_near, logprobs_by_transformers, policy_of
from tests.tasks.learner.processes import process

pytestmark = pytest.mark.engine

ROUNDED = {"dtype": "bfloat16", "policy_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    place = tmp_path_factory.mktemp("moe")
    return {family: tiny_family(place / family, family) for family in ROUTED}


def stored(directory):
    """Names and shapes of the tensors in a directory's weights."""
    files = [safe_open(path, "pt") for path in directory.glob("model*.safetensors")]
    return {name: tuple(file.get_slice(name).get_shape()) for file in files for name in file.keys()}  # noqa: SIM118


def rows_of(step):
    """Two optimizer steps, so that weights between them are summed in memory."""
    return batches([[sample(f"{step}{n}{k}", 9 + 4 * k, 10 * step + n + k) for k in (0, 1)] for n in (0, 1)], [0, 1])


@pytest.mark.essential
@pytest.mark.parametrize("family", ROUTED)
def test_samples_of_a_row_have_the_logprobs_of_transformers(world, directories, family):
    policy = load_policy(directories[family], TrainingConfig(device="cpu"), CPU)
    samples = [sample(str(length), length, length) for length in (40, 7, 71)]
    found, _ = run_row(policy, row_of(samples), CPU)
    model = AutoModelForCausalLM.from_pretrained(directories[family], dtype=torch.float32)
    expected = [logprobs_by_transformers(model, each.token_ids)[len(each.token_ids) // 2 - 1 :] for each in samples]
    assert_near(found, torch.cat(expected), 1e-5)
    assert policy.causal.config._attn_implementation == ATTENTION
    assert memory_sha256(policy, ALONE) == weights_sha256(directories[family])


@pytest.mark.parametrize("precision", [{}, ROUNDED], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ROUTED)
def test_a_policy_is_stored_under_the_names_of_its_checkpoint(world, directories, family, precision, tmp_path):
    trainer = loaded_trainer(world, directories[family], device="cpu", learning_rate=1e-3, **precision)
    updates, _ = train_step(trainer, 0, tmp_path, rows_of(0), save_optimizer=True)
    assert stored(tmp_path / "p1") == stored(directories[family])
    assert updates[1]["weights_sha256"] == weights_sha256(tmp_path / "p1") != updates[1]["weights_sha256_in"]
    assert updates[0]["metrics"]["tflops"] > 0
    # Of the policy that was read again the next step is the same, to the last bit.
    expected, _ = train_step(trainer, 1, tmp_path, rows_of(1))
    again = loaded_trainer(world, directories[family], device="cpu", learning_rate=1e-3, **precision)
    resume(again, tmp_path / "p1")
    found, _ = train_step(again, 1, tmp_path / "again", rows_of(1))
    assert [each["weights_sha256"] for each in found] == [each["weights_sha256"] for each in expected]


def test_two_ranks_train_and_store_what_one_does(world, directories, tmp_path):
    family = directories["qwen3_moe"]
    alone = loaded_trainer(world, family, device="cpu", learning_rate=1e-3)
    (_, expected), statistics = train_step(alone, 0, tmp_path / "one", rows_of(0))
    with process(tmp_path / "two", 2) as (_, report):
        from tasks.learner.client import Learner
        from tests.fixtures.learner_steps import configure, load_first

        learner = Learner(report["address"])
        configure(learner, 2, device="cpu", learning_rate=1e-3)
        load_first(learner, family)
        (_, update), of_two = train_step(learner, 0, tmp_path / "two", rows_of(0))
    assert stored(tmp_path / "two" / "p1") == stored(family)
    assert update["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for found, each in zip(of_two["logprobs"].to_pylist(), statistics["logprobs"].to_pylist(), strict=True):
        assert found == pytest.approx(each, abs=1e-5)


def test_the_operations_are_those_of_the_experts_that_a_token_uses(world, directories):
    policy = load_policy(directories["qwen3_moe"], TrainingConfig(device="cpu"), CPU)
    row, cost = row_of([sample("a", 33, 1)]), training_cost(policy)
    with FlopCounterMode(display=False) as counter:
        run_row(policy, row, CPU)
    # Forward alone is a third. Torch does not count attention on the CPU; the rotary embedding has one small product.
    expected = (33 * cost.token + cost.weighted * len(row.weighted)) / 3
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)


@pytest.mark.essential
def test_adapters_are_for_attention_and_those_of_experts_are_refused_in_words(world, directories):
    with pytest.raises(LearnerError, match=r"gate_proj are maps of experts, which are fused here.*mlp\.experts"):
        adapter_of(directories["qwen3_moe"], ("q_proj", "gate_proj"))
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapter_of(directories["qwen3_moe"])}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.essential
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_are_trained_and_are_what_peft_merges(world, family, tmp_path):
    directory = tiny_family(tmp_path / "model", family)
    lora = {"rank": 2, "alpha": 8.0, "target_modules": ["q_proj", "mlp.experts"]}
    trainer = loaded_trainer(world, directory, lora=lora, learning_rate=1e-2, gradient_checkpointing=True)
    assert trainer._loaded.policy.proof["proof_logprobs"] < 1e-6
    before = trainer.probe([*range(40)])
    train_step(trainer, 0, tmp_path, rows_of(0), save_optimizer=True)
    after = trainer.probe([*range(40)])
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3
    names = [name.partition("layers.0.")[2] for name in load_file(tmp_path / "p1" / "adapter_model.safetensors")]
    for module in ("mlp.experts", "mlp.experts.base_layer", "self_attn.q_proj"):
        assert f"{module}.lora_A.weight" in names
    merge(directory, tmp_path / "p1", tmp_path / "merged")
    assert stored(tmp_path / "merged") == stored(directory)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert_near(torch.tensor(after[1:]), logprobs_by_transformers(model, [*range(40)]), 1e-5)
    again = new_trainer(world, lora=lora, learning_rate=1e-2)
    resume(again, tmp_path / "p1", base=str(directory))
    expected, _ = train_step(trainer, 1, tmp_path, rows_of(1))
    found, _ = train_step(again, 1, tmp_path / "again", rows_of(1))
    assert [each["weights_sha256"] for each in found] == [each["weights_sha256"] for each in expected]


def adapter_of(directory, modules="all-linear"):
    """Names of the tensors of a new adapter."""
    settings = LoraConfig(rank=2, target_modules=modules)
    adapter = adapters.open_adapter("p0", directory, None, settings)
    return adapters.tensors(load_policy(directory, TrainingConfig(lora=settings), CPU, adapter).causal)


def test_a_dense_model_is_asked_once_for_other_forms_of_its_weights(world, model_directory, monkeypatch):
    """Each question walks through all modules of the model."""
    policy, plain, asked = policy_of(model_directory), conversion_mapping.get_model_conversion_mapping, []

    def count(*arguments, **options):
        asked.append(arguments)
        return plain(*arguments, **options)

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", count)
    weights = own_tensors(policy.causal)
    write_shards(weights, "model", None, ALONE, causal=policy.causal)
    assert list(stored_shapes(policy.causal, weights)) == list(weights)
    assert len(asked) == 2
