"""The operations of a batch by the formula are those that torch counts, and what is not known is not made up."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from configs.training import LoraConfig, TrainingConfig
from tasks.learner import adapters
from tasks.learner.model import load_policy, run_row
from tasks.learner.speed import NAMES, Cost, StepTimer, device_peak, training_cost
from tests.fixtures.packed import all_rows, batch_of, sample
from tests.fixtures.policies import CPU, policy_of
from tests.fixtures.varlen import varlen_on_cpu
from tests.tasks.learner.ranks import plain_policy

pytestmark = pytest.mark.engine

LENGTHS = (9, 33, 4)


@pytest.fixture
def rows():
    samples = [sample(str(length), length, length) for length in LENGTHS]
    return all_rows(batch_of([samples, samples[:1]]))


def counted(policy, row):
    """Return the operations that torch counts: of matrices, and of attention."""
    with FlopCounterMode(display=False) as counter, varlen_on_cpu():
        values, entropies = run_row(policy, row, CPU)
        (values.sum() + entropies.sum()).backward()
    found = {str(op): number for op, number in counter.get_flop_counts()["Global"].items()}
    attention = sum(number for op, number in found.items() if "varlen" in op)
    return sum(found.values()) - attention, attention


def test_equals_what_torch_counts(model_directory, rows):
    policy = plain_policy(model_directory, torch.float32)
    cost, row = training_cost(policy), rows[0]
    matrices, attention = counted(policy, row)
    # The head computes its logits twice, but torch does not count the product that is added to the weight's gradient in
    # place. The rotary embedding has one small product: positions by frequencies.
    rotary = 2 * 4 * sum(LENGTHS)
    assert matrices == cost.token * sum(LENGTHS) + cost.weighted * len(row.weighted) + rotary
    # Torch counts whole squares of scores, and those that a kernel computes again: seven products in place of three.
    assert attention == cost.pair * sum(length**2 for length in LENGTHS) * 2 * 7 / 6
    alone = [cost.of([each]) for each in rows]
    assert cost.of(rows) == sum(alone) and alone[0] == pytest.approx(
        cost.token * 46 + cost.pair * (81 + 1089 + 16) + cost.weighted * len(row.weighted)
    )


def test_weights_that_are_not_trained_cost_two_thirds(world, model_directory):
    whole = training_cost(policy_of(model_directory))
    adapter = adapters.open_adapter("p0", model_directory, None, LoraConfig(rank=1))
    found = training_cost(load_policy(model_directory, TrainingConfig(lora=LoraConfig(rank=1)), CPU, adapter))
    assert found.weighted == pytest.approx(whole.weighted * 2 / 3) and found.pair == whole.pair
    assert whole.token * 2 / 3 < found.token < whole.token


def test_of_experts_nothing_is_said(model_directory):
    policy = plain_policy(model_directory, torch.float32)
    policy.layers()[0].experts = torch.nn.Parameter(torch.zeros(2, 3, 4))
    assert training_cost(policy) is None


def test_figures_of_a_step_on_the_cpu(rows):
    timer = StepTimer(CPU)
    timer.end("gradients")
    timer.end("optimizer")
    found = timer.figures(rows, Cost(6.0, 2.0, 3.0, shares=False), 2)
    assert set(found) == set(NAMES) - {"seconds_writing", "proof_logprobs", "proof_gradient", "seconds_proof"}
    seconds = found["seconds_gradients"] + found["seconds_optimizer"]
    assert found["tokens_per_second"] == pytest.approx((46 + 9) / seconds)
    assert found["tflops_per_second"] == pytest.approx(found["tflops"] / seconds / 2)
    assert [found[name] for name in ("mfu", "peak_allocated_gib", "peak_reserved_gib")] == [None] * 3
    assert timer.figures(rows, None, 1)["tflops"] is None


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B300 SXM6 AC", 2250),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 3090", None),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_own_name(name, teraflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device_peak(torch.device("cuda")) == (teraflops and pytest.approx(teraflops * 1e12))
