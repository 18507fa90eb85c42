"""Products in 8 bits against those in float64, within what rounding to e4m3 can move, and a model that trains."""

import pytest
import torch

from configs.losses import DppoLoss
from tasks.learner import fp8
from tasks.learner.distributed import ALONE
from tasks.learner.loop import accumulate_gradients
from tasks.learner.loss import Objective
from tasks.learner.model import run_row
from tasks.learner.optimizer import apply_gradients, new_optimizer
from tasks.learner.protocol import LearnerError
from tasks.learner.tiny import tiny_qwen3
from tests.fixtures.packed import batch_of, row_of, sample
from tests.fixtures.policies import CPU, flat_gradient, policy_of

pytestmark = pytest.mark.engine

RELATIVE = 2**-4
"""Three bits behind the point: half of the last one, of a value that is at least one."""
SUBNORMAL = 2**-10 / 224
"""Half a step of the smallest values, as a share of a row's largest, which is quantised as 224 or more."""


def random(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16)


def test_a_row_is_rounded_to_four_bits_of_its_largest_power_of_two():
    values = torch.tensor([[3.0, -0.1], [0.0, 0.0], [448.0, 17.0], [450.0, 1.0]], dtype=torch.bfloat16)
    eights, factors = fp8.quantise(values)
    assert factors.flatten().tolist()[0::2] == [1 / 128, 1.0] and factors[3] == 2.0
    # 448 / 3 is at least 128. Of 0.1, which is 0.10009765625 in bfloat16, 12.8125 is left, between 12 and 13.
    assert eights.float().tolist() == [[384.0, -13.0], [0.0, 0.0], [448.0, 16.0], [224.0, 0.5]]


def test_a_product_is_that_of_the_quantised_values():
    torch.manual_seed(0)
    left, right = random(37, 64), random(48, 64)
    quantised = [values.float() * factors for values, factors in map(fp8.quantise, (left, right))]
    expected = quantised[0] @ quantised[1].t()
    torch.testing.assert_close(fp8.product(left, right).float(), expected, rtol=2**-8, atol=2**-8)
    assert not torch.equal(expected.bfloat16(), left @ right.t())


def bound(left, right):
    """Return by how much a product [rows, columns] of two operands may be off, of which both are rounded."""
    off = [RELATIVE * each.abs() + SUBNORMAL * each.abs().amax(1, keepdim=True) for each in (left, right)]
    both = (left.abs() + off[0]) @ (right.abs() + off[1]).t() - left.abs() @ right.abs().t()
    return both + 2**-8 * ((left @ right.t()).abs() + both)


@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_a_linear_map_and_its_gradients_are_within_the_bound_of_e4m3(tokens):
    torch.manual_seed(0)
    states, weight = random(tokens, 64).requires_grad_(), (random(48, 64) / 8).requires_grad_()
    states.data[:, 3] *= 50  # an outlier, as models have them
    gradient = random(tokens, 48)
    outputs = fp8.linear(states, weight)
    outputs.backward(gradient)
    x, w, dy = (each.detach().double() for each in (states, weight, gradient))
    for found, left, right in ((outputs, x, w), (states.grad, dy, w.t()), (weight.grad, dy.t(), x.t())):
        off = (found.detach().double() - left @ right.t()).abs()
        assert (off <= bound(left, right)).all()
        assert 0 < off.square().mean().sqrt() < 0.06 * (left @ right.t()).square().mean().sqrt()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("small") / "policy", hidden=64, layers=2, intermediate=96, seed=3)


def half_policy(directory, **settings):
    return policy_of(directory, dtype="bfloat16", **settings)


def test_all_maps_of_layers_are_taken_but_those_that_do_not_fit_and_routers(world, small, tmp_path):
    def taken(policy):
        return {name for name, module in policy.named_modules() if "forward" in vars(module)}

    names = {name.rpartition(".")[2] for name in taken(half_policy(small, fp8=True))}
    assert names == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert not taken(half_policy(small))
    narrow = tiny_qwen3(tmp_path / "policy", hidden=64, layers=1, intermediate=72)
    assert {name.rpartition(".")[2][0] for name in taken(half_policy(narrow, fp8=True))} == {*"qkvo"}
    layer = torch.nn.ModuleDict({"gate": torch.nn.Linear(64, 16), "down": torch.nn.Linear(64, 16)})
    fp8.use_fp8(torch.nn.ModuleList([layer]))
    assert "forward" in vars(layer["down"]) and "forward" not in vars(layer["gate"])
    with pytest.raises(LearnerError, match="no linear map of widths that are multiples of 16"):
        fp8.use_fp8(torch.nn.ModuleList([torch.nn.Linear(64, 24)]))


def curve(policy, steps):
    """Return the losses of steps on the same three samples, which a model learns by heart."""
    rows = batch_of([[sample(name, 20 + number, number, "ce") for number, name in enumerate("abc")]])
    optimizer = new_optimizer(policy, policy_settings())
    losses = []
    for _ in range(steps):
        totals = accumulate_gradients(policy, rows, Objective(DppoLoss()), ALONE, CPU)
        losses.append(totals.sums["ce_loss"])
        apply_gradients(optimizer, 3e-3)
    return torch.tensor(losses)


def policy_settings():
    from configs.training import TrainingConfig

    return TrainingConfig()


def test_a_model_learns_as_it_does_in_bfloat16(world, small):
    plain, eights = (curve(half_policy(small, fp8=chosen), 30) for chosen in (False, True))
    assert not torch.equal(plain, eights)
    assert plain[-1] < 0.3 * plain[0]
    assert (plain - eights).abs().max() < 0.05 * plain[0]


@pytest.mark.parametrize("kind", [True, "selective"])
def test_recomputed_layers_have_the_same_gradients_to_the_last_bit(world, small, kind):
    row = row_of([sample("a", 23, 1), sample("b", 14, 2)])
    gradients = []
    for recompute in (False, kind):
        policy = half_policy(small, fp8=True, gradient_checkpointing=recompute)
        logprobs, entropies = run_row(policy, row, CPU)
        (logprobs.sum() + entropies.sum()).backward()
        gradients.append(flat_gradient(policy))
    assert torch.equal(*gradients) and gradients[0].abs().max() > 0
