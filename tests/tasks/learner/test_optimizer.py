"""The schedule by hand, the AdamW step by its formula, clipping by the norm."""

import math

import pytest
import torch

from configs.sections import TrainingConfig
from tasks.learner.distributed import World
from tasks.learner.optimizer import apply_gradients, clip_gradients, new_optimizer
from tasks.learner.schedules import learning_rate

pytestmark = pytest.mark.engine

ALONE = World(rank=0, size=1, local_rank=0)


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, {0: 1.0, 1: 1.0, 10_000: 1.0}),
        ({"warmup_steps": 4}, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 99: 1.0}),
        ({"decay_steps": 4}, {0: 1.0, 1: 0.75, 3: 0.25, 4: 0.0, 9: 0.0}),
        ({"warmup_steps": 2, "decay_steps": 6}, {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.75, 5: 0.25, 6: 0.0, 7: 0.0}),
    ],
)
def test_learning_rate(settings, rates):
    config = TrainingConfig(learning_rate=2e-3, **settings)
    assert {step: learning_rate(step, config) for step in rates} == pytest.approx(
        {step: 2e-3 * rate for step, rate in rates.items()}
    )


def layer(seed=0):
    torch.manual_seed(seed)
    made = torch.nn.Linear(3, 2)
    made(torch.randn(5, 3)).square().sum().backward()
    return made


def test_two_steps_of_adamw_with_decay_on_matrices_only():
    config = TrainingConfig(learning_rate=0.1, betas=(0.8, 0.9), epsilon=1e-6, weight_decay=0.5)
    made = layer()
    weight, bias = made.weight.detach().double(), made.bias.detach().double()
    gradients = made.weight.grad.double().clone(), made.bias.grad.double().clone()
    optimizer = new_optimizer(made, config)
    for _ in range(2):
        made.weight.grad, made.bias.grad = (gradient.float() for gradient in gradients)
        apply_gradients(optimizer, 0.1)
    for step in (1, 2):
        weight = weight * (1 - 0.1 * 0.5) - 0.1 * adam(gradients[0], step)
        bias = bias - 0.1 * adam(gradients[1], step)
    torch.testing.assert_close(made.weight.detach().double(), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.bias.detach().double(), bias, rtol=1e-5, atol=1e-6)
    assert made.weight.grad is None


def adam(gradient, step):
    """The update for a gradient that has been the same in every step: both bias corrections cancel."""
    first, second = gradient * (1 - 0.8**step), gradient**2 * (1 - 0.9**step)
    return (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)


def test_clipping():
    made = layer()
    before = torch.cat([p.grad.flatten() for p in made.parameters()])
    norm = before.double().norm().item()
    assert clip_gradients(made, norm * 2, ALONE) == pytest.approx(norm, rel=1e-12)
    assert torch.equal(before, torch.cat([p.grad.flatten() for p in made.parameters()]))
    assert clip_gradients(made, norm / 4, ALONE) == pytest.approx(norm, rel=1e-12)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in made.parameters()]), before / 4)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_reported_and_left_alone(value):
    made = layer()
    made.bias.grad[0] = value
    before = made.weight.grad.clone()
    assert not math.isfinite(clip_gradients(made, 1.0, ALONE))
    assert torch.equal(before, made.weight.grad)
