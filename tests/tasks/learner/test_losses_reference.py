"""Every loss against the slow reference and against finite differences, on rows of all shapes; and what may not matter.

The reference takes one token after the other and keeps ratios, masks and signals that carry no gradient where they are.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.losses import (
    CispoLoss,
    DppoLoss,
    GspoLoss,
    IpoLoss,
    PpoLoss,
    RefKlConfig,
    SequenceMask,
    TruncatedImportance,
)
from tasks.learner.loss import Objective, WeightedTokens, token_loss
from tests.tasks.learner.slow_losses import Token, packed, slow

pytestmark = pytest.mark.engine

DENOMINATORS = {"rl": 7, "ce": 3, "ref_kl": 2}
TIGHT = RefKlConfig(mask_low=0.05, mask_high=0.1)
TYPES = [
    DppoLoss(),
    DppoLoss(mask_low=0.01, mask_high=0.05, kl_tau=0.5),
    IpoLoss(threshold=0.1),
    PpoLoss(clip_high=0.28),
    PpoLoss(dual_clip=1.8, kl_tau=0.1),
    CispoLoss(clip_low=0.5, clip_high=1.5, kl_tau=0.1),
    GspoLoss(clip_low=0.3, clip_high=0.6),
]
OPTIONS = [
    {},
    {"tis": TruncatedImportance(level="token", cap=1.5)},
    {"tis": TruncatedImportance(level="sequence", cap=1.5)},
    {"sequence_mask": SequenceMask(ratio="geometric", low=0.5, high=2.5)},
    {"sequence_mask": SequenceMask(ratio="extremes", low=0.6, high=None), "tis": TruncatedImportance(cap=1.2)},
]
ALL = [type_.model_copy(update=options) for type_, options in itertools.product(TYPES, OPTIONS)]
IDS = [f"{index}-{loss.type}" for index, loss in enumerate(ALL)]

LOGPROBS = st.one_of(st.floats(-8, -0.01), st.sampled_from([-1.0, -0.5, -60.0]))
MEMBERS = st.sampled_from([("rl",), ("ce",), ("ref_kl",), ("rl", "ce"), ()])


@st.composite
def tokens(draw, segment):
    weight = draw(st.sampled_from([0.25, 1.0, -0.5]))
    advantage = draw(st.sampled_from([-1.5, 0.0, 0.4]))
    weights = dict.fromkeys(draw(MEMBERS), weight)
    return Token(draw(LOGPROBS), draw(LOGPROBS), advantage, segment=segment, **weights)


@st.composite
def rows(draw):
    """Sequences of one to five tokens, some of them without any rl token."""
    row = []
    for segment in range(draw(st.integers(1, 4))):
        row += draw(st.lists(tokens(segment), min_size=1, max_size=5))
    return row


def slow_gradient(row, loss):
    """Return value and gradient of the slow reference."""
    l = [torch.tensor(token.l, dtype=torch.float64, requires_grad=True) for token in row]  # noqa: E741
    total = slow(l, row, DENOMINATORS, loss, TIGHT)
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return float(total), [0.0] * len(row)
    total.backward()
    return total.item(), [0.0 if each.grad is None else each.grad.item() for each in l]


@pytest.mark.parametrize("loss", ALL, ids=IDS)
@settings(max_examples=20)
@given(row=rows())
def test_equals_the_slow_reference(row, loss):
    value, gradient, _ = packed(row, DENOMINATORS, loss, TIGHT)
    slow_value, expected = slow_gradient(row, loss)
    assert gradient == pytest.approx(expected, rel=1e-10, abs=1e-13)
    scale = 1 + sum(abs(each) for each in expected)
    assert value == pytest.approx(slow_value, rel=1e-10, abs=1e-12 * scale)


def fixed_row(seed, size=40):
    """Return a row with moderate ratios, in which all components, masks and signs occur."""
    chance = random.Random(seed)
    row = []
    for number in range(size):
        q = chance.uniform(-3, -0.1)
        components = chance.choice([("rl",), ("rl",), ("ce",), ("ref_kl",)])
        token = Token(min(q + chance.gauss(0, 0.7), -0.01), q, chance.gauss(0, 1), segment=number // 4)
        row.append(replace(token, **dict.fromkeys(components, chance.uniform(0.5, 1.5))))
    return row


@pytest.mark.parametrize("loss", ALL, ids=IDS)
def test_the_gradient_is_the_finite_difference(loss):
    row, step = fixed_row(3), 1e-6
    _, gradient, measured = packed(row, DENOMINATORS, loss, TIGHT)
    points = [token.l for token in row]
    for index in range(len(row)):
        ends = [[*points[:index], points[index] + sign * step, *points[index + 1 :]] for sign in (1, -1)]
        above, below = (slow(end, row, DENOMINATORS, loss, TIGHT) for end in ends)
        assert gradient[index] == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-8)
    assert sum(map(bool, gradient)) > 6
    assert (loss.type == "cispo" and loss.sequence_mask is None) or measured.sums["masked"] > 0


@pytest.mark.parametrize("seed", range(5))
def test_dppo_is_what_it_was_to_the_last_bit(seed):
    """As when it was the only loss: recorded work must come out the same."""
    torch.manual_seed(seed)
    size = 300 + seed
    q = -6 * torch.rand(size)
    start = (q + 0.5 * torch.randn(size)).clamp(max=-1e-3)
    advantages = torch.randn(size)
    advantages[:20] = 0.0
    rl = torch.where(torch.rand(size) < 0.8, 1.0, 0.0)
    ce = torch.where(rl == 0, 0.1, 0.0)
    denominators = {"rl": int(rl.sum()), "ce": int((ce != 0).sum()), "ref_kl": 0}
    before, now = (start.clone().requires_grad_() for _ in range(2))
    log_ratio = torch.where(rl != 0, before - q, 0.0)
    moved = before.detach().exp() - q.exp()
    inside = ~(((advantages > 0) & (moved > 0.2)) | ((advantages < 0) & (-moved > 0.2))) | (rl == 0)
    policy = -torch.where(inside, advantages, 0.0) * torch.where(inside, log_ratio, 0.0).exp()
    former = (rl * (policy + 1e-3 * log_ratio**2) / denominators["rl"]).sum()
    former = former + (ce * -before / denominators["ce"]).sum()
    former.backward()
    tokens = WeightedTokens(q, advantages, rl, ce, torch.zeros(size), torch.arange(size) // 50, 7)
    loss, measured = token_loss(now, now.detach(), tokens, denominators, Objective(DppoLoss()))
    loss.backward()
    assert torch.equal(loss, former)
    assert torch.equal(now.grad, before.grad)
    assert measured.sums["masked"] > 2
