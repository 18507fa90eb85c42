"""The steps of Muon and sign-SGD by their formulas, torch's AdamW, what each of them updates, clipping by the norm."""

import math

import pytest
import torch

from configs.training import TrainingConfig
from tasks.learner.distributed import ALONE
from tasks.learner.optimizer import apply_gradients, clip_gradients, new_optimizer
from tests.fixtures.policies import flat_gradient
from tests.tasks.learner.ranks import plain_policy

pytestmark = [pytest.mark.engine, pytest.mark.essential]


def layer(seed=0):
    torch.manual_seed(seed)
    made = torch.nn.Linear(3, 2)
    made(torch.randn(5, 3)).square().sum().backward()
    return made


def test_adamw_is_torchs_with_decay_on_matrices_only():
    config = TrainingConfig(betas=(0.8, 0.9), epsilon=1e-6, weight_decay=0.5)
    (part,) = new_optimizer(layer(), config).parts
    made = part.inner
    found = [(group["weight_decay"], group["betas"], group["eps"]) for group in made.param_groups]
    assert isinstance(made, torch.optim.AdamW) and found == [(decay, (0.8, 0.9), 1e-6) for decay in (0.5, 0.0)]
    assert [[each.ndim for each in group["params"]] for group in made.param_groups] == [[2], [1]]


def assert_values(linear, weight, bias):
    torch.testing.assert_close(linear.weight.detach().double(), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(linear.bias.detach().double(), bias, rtol=1e-5, atol=1e-6)


def test_clipping():
    made = layer()
    before = flat_gradient(made)
    norm = before.double().norm().item()
    assert clip_gradients(made, norm * 2, ALONE) == pytest.approx(norm, rel=1e-12)
    assert torch.equal(before, flat_gradient(made))
    assert clip_gradients(made, norm / 4, ALONE) == pytest.approx(norm, rel=1e-12)
    torch.testing.assert_close(flat_gradient(made), before / 4)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_reported_and_left_alone(value):
    made = layer()
    made.bias.grad[0] = value
    before = made.weight.grad.clone()
    assert not math.isfinite(clip_gradients(made, 1.0, ALONE))
    assert torch.equal(before, made.weight.grad)


@pytest.mark.parametrize("nesterov", [True, False])
def test_three_steps_of_muon_by_its_formula(policy, nesterov):
    """A matrix goes by Newton-Schulz over its momentum; torch runs that in bfloat16, hence the tolerance."""
    chosen = {"type": "muon", "momentum": 0.8, "nesterov": nesterov}
    optimizer = new_optimizer(policy, TrainingConfig(weight_decay=0.5, optimizer=chosen))
    name = "model.layers.1.mlp.up_proj.weight"
    parameter = policy.causal.get_parameter(name)
    rows, columns = parameter.shape
    assert rows > columns, "the transposed case is the one to look at"
    expected = {ahead: parameter.detach().double() for ahead in (True, False)}
    momentum, size = 0.0, 0.2 * math.sqrt(rows)
    for step in range(3):
        gradient = fill_gradients(policy, step)[name].double()
        momentum = 0.8 * momentum + 0.2 * gradient
        for ahead, weight in expected.items():
            update = size * newton_schulz(0.2 * gradient + 0.8 * momentum if ahead else momentum)
            expected[ahead] = weight * (1 - 0.1 * 0.5) - 0.1 * update
        apply_gradients(optimizer, 0.1)
    distances = {ahead: (parameter.detach() - weight).norm() for ahead, weight in expected.items()}
    one_update = 0.1 * update.norm()
    assert distances[nesterov] < 0.05 * one_update < 0.2 * one_update < distances[not nesterov]


def newton_schulz(matrix, steps=5):
    """The quintic iteration with Jordan's coefficients, whole matrices in float64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_muon_has_the_matrices_of_the_layers_and_adamw_the_rest(policy):
    optimizer = new_optimizer(policy, TrainingConfig(weight_decay=0.5, optimizer={"type": "muon"}))
    names = {id(parameter): name for name, parameter in policy.causal.named_parameters()}
    matrices, rest = [{names[id(p)] for p in part.parameters()} for part in optimizer.parts]
    assert matrices | rest == set(names.values()) and not matrices & rest
    assert {name.split(".")[-2] for name in matrices} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    }
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= rest
    decays = [[group["weight_decay"] for group in part.inner.param_groups] for part in optimizer.parts]
    assert decays == [[0.5], [0.5, 0.0]]


def test_a_tied_head_is_an_embedding(tmp_path):
    from tasks.learner.tiny import tiny_qwen3

    tied = plain_policy(tiny_qwen3(tmp_path / "tied", hidden=32, layers=1, tied=True), torch.float32)
    optimizer = new_optimizer(tied, TrainingConfig(optimizer={"type": "muon"}))
    embedding = tied.causal.get_input_embeddings().weight
    assert tied.causal.get_output_embeddings().weight is embedding
    assert [any(p is embedding for p in part.parameters()) for part in optimizer.parts] == [False, True]


def test_muon_s_own_learning_rate_keeps_its_ratio_on_the_schedule(policy):
    config = TrainingConfig(learning_rate=1e-3, optimizer={"type": "muon", "learning_rate": 2e-2})
    optimizer = new_optimizer(policy, config)
    fill_gradients(policy, 0)
    apply_gradients(optimizer, 5e-4)
    rates = [group["lr"] for part in optimizer.parts for group in part.inner.param_groups]
    assert rates == pytest.approx([1e-2, 5e-4, 5e-4], rel=1e-12)
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("momentum", [0.0, 0.75])
def test_three_steps_of_sign_sgd(momentum):
    """Signs of the moving average, and of the gradient itself where nothing is averaged; zero has no sign."""
    config = TrainingConfig(weight_decay=0.5, optimizer={"type": "sign_sgd", "momentum": momentum})
    made, gradients = layer(), [[0.5, -2.0, 0.0], [-0.125, 4.0, 0.0], [-0.5, -0.25, 0.0]]
    weight, bias = made.weight.detach().double(), made.bias.detach().double()
    signs = {0.0: [[1, -1, 0], [-1, 1, 0], [-1, -1, 0]], 0.75: [[1, -1, 0], [1, 1, 0], [-1, 1, 0]]}[momentum]
    optimizer = new_optimizer(made, config)
    for gradient, sign in zip(gradients, signs, strict=True):
        made.weight.grad, made.bias.grad = torch.tensor([gradient] * 2), torch.tensor(gradient[:2])
        apply_gradients(optimizer, 0.1)
        weight = weight * (1 - 0.1 * 0.5) - 0.1 * torch.tensor([sign] * 2)
        bias = bias - 0.1 * torch.tensor(sign[:2])
    assert_values(made, weight, bias)


def fill_gradients(policy, seed):
    """Give every parameter a random gradient; return them by name."""
    torch.manual_seed(seed)
    for parameter in policy.parameters():
        parameter.grad = torch.randn(parameter.shape)
    return {name: parameter.grad.clone() for name, parameter in policy.causal.named_parameters()}


@pytest.fixture
def policy(model_directory):
    """The small model in float32, not sharded."""
    return plain_policy(model_directory, torch.float32)
