"""The loss at the output head in one pass: the figures of logits that are computed twice, by fewer products."""

from itertools import product

import pytest
import torch

from configs.losses import (
    CispoLoss,
    CustomLoss,
    DpoLoss,
    DppoLoss,
    GspoLoss,
    IpoLoss,
    KtoLoss,
    PpoLoss,
    SequenceMask,
    TruncatedImportance,
    is_elementwise,
)
from tasks.learner import loop
from tasks.learner.distributed import ALONE
from tasks.learner.head import PLAIN, Kernels, fused_loss, logits_gradient_at_once, measure_at_once, token_logprobs
from tasks.learner.loop import accumulate_gradients
from tasks.learner.loss import Objective
from tasks.learner.losses import LOSSES
from tests.fixtures.output_head import TEMPERATURES, problem
from tests.fixtures.packed import batch_of, sample
from tests.fixtures.policies import CPU, assert_near, flat_gradient

pytestmark = [pytest.mark.engine, pytest.mark.essential]

ROWS = [
    [sample("a", 9, 1), sample("b", 5, 2, "ce"), sample("c", 12, 3, temperature=0.7), sample("d", 7, 4, "ref_kl")],
    [sample("e", 3, 5)],
]
TYPES = [
    DppoLoss(mask_low=0.01, mask_high=0.05, kl_tau=0.5),
    IpoLoss(threshold=0.001),
    PpoLoss(clip_low=0.1, clip_high=0.1, dual_clip=1.8, kl_tau=0.1),
    CispoLoss(clip_low=0.5, clip_high=0.5),
    GspoLoss(clip_low=0.02, clip_high=0.02),
    DpoLoss(),
    KtoLoss(),
    CustomLoss(function="tests.tasks.learner.own_losses:only_praise"),
]
OPTIONS = [
    {},
    {"tis": TruncatedImportance(level="token", cap=1.1)},
    {"tis": TruncatedImportance(level="sequence", cap=1.1)},
    {"sequence_mask": SequenceMask(low=0.6, high=1.5)},
]
EVERY = [each.model_copy(update=options) for each, options in product(TYPES, OPTIONS)]


def trained(policy, loss):
    """Return gradient, totals and statistics of two rows."""
    policy.zero_grad()
    rows = []
    totals = accumulate_gradients(policy, batch_of(ROWS), Objective(loss), ALONE, CPU, take=rows.extend)
    found = [torch.from_numpy(getattr(row, name)) for row in rows for name in ("logprobs", "entropies", "masked")]
    return flat_gradient(policy), totals, torch.cat(found)


@pytest.mark.parametrize("loss", EVERY, ids=lambda loss: loss.type)
def test_one_pass_trains_as_two_do_with_every_loss(exact_policy, loss, monkeypatch):
    asked = []
    plain = loop.row_loss
    monkeypatch.setattr(loop, "row_loss", lambda *args: asked.append(1) or plain(*args))
    gradient, totals, statistics = trained(exact_policy, loss)
    assert len(asked) == (len(ROWS) if is_elementwise(loss) else 0)
    monkeypatch.setattr(Objective, "is_elementwise", False)
    expected, expected_totals, expected_statistics = trained(exact_policy, loss)
    scale = expected.abs().max()
    assert scale > 1e-3
    assert_near(gradient / scale, expected / scale, 1e-14)
    assert torch.equal(statistics, expected_statistics)
    assert totals.sums == expected_totals.sums and totals.maxima == expected_totals.maxima


def test_every_loss_is_tried_in_every_way():
    assert {each.type for each in EVERY} == set(LOSSES)
    assert {each.type for each in EVERY if is_elementwise(each)} == {"dppo", "ipo", "ppo", "cispo", "dpo", "kto"}


def shares(logprobs, part):
    """A loss whose derivative by a log-prob is another one at each."""
    return (torch.arange(len(TEMPERATURES))[part] * logprobs**2).sum() + logprobs.exp().sum()


@pytest.mark.parametrize("two_passes", [False, True])
def test_what_is_compiled_computes_the_same(two_passes):
    """Not compiled here; test_compile.py has it compiled."""
    at_once = Kernels(measure_at_once, logits_gradient_at_once)
    found = []
    for kernels in (PLAIN, at_once):
        hidden, weight, targets = problem()
        if two_passes:
            logprobs, entropies = token_logprobs(hidden, weight, targets, TEMPERATURES, 2, kernels)
            total = shares(logprobs, slice(None)) + 0.3 * (entropies**2).sum()
        else:
            total, logprobs, entropies = fused_loss(hidden, weight, targets, TEMPERATURES, 2, shares, kernels)
        found.append((logprobs, entropies, *torch.autograd.grad(total, (hidden, weight))))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_equals_the_loss_of_log_probs_from_logits_computed_twice(chunk, factor):
    hidden, weight, targets = problem()
    total, logprobs, entropies = fused_loss(hidden, weight, targets, TEMPERATURES, chunk, shares)
    found = torch.autograd.grad(factor * total, (hidden, weight))
    plain_logprobs, plain_entropies = token_logprobs(hidden, weight, targets, TEMPERATURES, chunk)
    plain = shares(plain_logprobs, slice(None))
    expected = torch.autograd.grad(factor * plain, (hidden, weight))
    torch.testing.assert_close(total, plain, rtol=1e-14, atol=0)
    assert torch.equal(logprobs, plain_logprobs) and torch.equal(entropies, plain_entropies)
    assert not logprobs.requires_grad and not entropies.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def test_a_half_precision_head_is_as_exact_as_with_two_passes():
    torch.manual_seed(2)
    hidden = torch.rand(64, 8).bfloat16().requires_grad_()
    weight = torch.randn(16, 8).bfloat16().requires_grad_()
    targets = torch.randint(0, 16, (64,))
    fused_loss(hidden, weight, targets, torch.ones(64), 8, lambda logprobs, part: (logprobs**2).sum())[0].backward()
    found = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    (token_logprobs(hidden, weight, targets, torch.ones(64), 8)[0] ** 2).sum().backward()
    assert torch.equal(found[0], hidden.grad) and torch.equal(found[1], weight.grad)


def test_a_row_without_weighted_tokens_has_a_gradient_of_zero():
    """Ranks without work run one such row, or others would wait for their share for ever."""
    hidden, weight, targets = problem()
    fused_loss(hidden[:0], weight, targets[:0], TEMPERATURES[:0], 4, shares)[0].backward()
    assert weight.grad.abs().max().item() == 0.0
