"""Losses as verl and prime-rl write them, over batches of ragged rollouts with padding: values and gradients.

Their formulas are over matrices of rollouts and positions with a mask; ours are over packed tokens. Verl is that of
1dda039, prime-rl of 559b447. Verl's r is of the learner before the update, so that its mismatch is none here.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.losses import CispoLoss, DppoLoss, IpoLoss, PpoLoss
from tests.fixtures.padded import packed_loss

pytestmark = pytest.mark.engine


@st.composite
def batches(draw):
    """Rollouts of one to seven tokens, some of one alone, some with an advantage of zero; some of moderate ratios."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    torch.manual_seed(draw(st.integers(0, 10_000)))
    shape = (len(lengths), max(lengths))
    q = -3 * torch.rand(shape, dtype=torch.float64) - 0.01
    l = (q + draw(st.sampled_from([0.05, 1.0])) * torch.randn(shape)).clamp(max=-1e-3)  # noqa: E741
    worth = draw(st.lists(st.sampled_from([-1.5, -0.25, 0.0, 0.75]), min_size=len(lengths), max_size=len(lengths)))
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return l, q, torch.tensor(worth, dtype=torch.float64)[:, None].expand(shape), mask


def theirs(batch, per_token):
    """Value and gradient of the mean over the mask of a loss for each token."""
    logprobs, q, advantages, mask = batch
    logprobs = logprobs.clone().requires_grad_()
    value = (per_token(logprobs, q, advantages) * mask).sum() / mask.sum()
    value.backward()
    return value.detach(), logprobs.grad


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@settings(max_examples=60)
@given(batches(), st.sampled_from([(0.2, 0.2, 3.0), (0.2, 0.28, 1.3)]))
def test_ppo_with_a_dual_clip_is_verl_s(batch, bounds):
    """`compute_policy_loss_vanilla` in verl/trainer/ppo/core_algos.py, lines 1342 to 1361, averaged as `token-mean`."""
    low, high, dual = bounds

    def per_token(l, q, advantages):  # noqa: E741
        ratio = (l - q).exp()
        worse = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
        return torch.where(advantages < 0, torch.minimum(worse, -advantages * dual), worse)

    assert_same(packed_loss(batch, PpoLoss(clip_low=low, clip_high=high, dual_clip=dual)), theirs(batch, per_token))


@settings(max_examples=40)
@given(batches())
def test_cispo_is_verl_s_at_its_bounds(batch):
    """`compute_policy_loss_cispo` there, lines 2078 to 2083."""

    def per_token(l, q, advantages):  # noqa: E741
        return -(l - q).exp().clamp(0.8, 1.2).detach() * advantages * l

    assert_same(packed_loss(batch, CispoLoss(clip_low=0.2, clip_high=0.2)), theirs(batch, per_token))


@settings(max_examples=40)
@given(batches())
def test_ipo_and_dppo_at_their_defaults_are_prime_rl_s(batch):
    """`ipo_loss_fn` and `default_loss_fn` in src/prime_rl/trainer/rl/loss.py, lines 164 and 109; its defaults are those
    of `IPOLossConfig` and `DefaultLossConfig`: 0.1, 0.2 and 0.2, and 1e-3 for the squared log ratio."""

    def masked(outside):
        def per_token(l, q, advantages):  # noqa: E741
            keep = ~outside((l.exp() - q.exp()).detach(), advantages)
            return -(keep * advantages * (l - q).exp()) + 1e-3 * (l - q) ** 2

        return per_token

    assert_same(packed_loss(batch, IpoLoss()), theirs(batch, masked(lambda moved, _: moved.abs() > 0.1)))
    one_sided = masked(lambda moved, worth: torch.where(worth > 0, moved > 0.2, moved < -0.2))
    assert_same(packed_loss(batch, DppoLoss()), theirs(batch, one_sided))
