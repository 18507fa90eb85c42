"""The loss by hand, against a slow reference token by token, and on the values that used to give NaN."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.losses import DppoLoss
from tasks.learner.loss import Tokens, outside_trust_region, token_loss

pytestmark = pytest.mark.engine

DPPO = DppoLoss(mask_low=0.2, mask_high=0.2, kl_tau=1e-3)
CE_ONLY = {"rl": 1, "ce": 2, "ref_kl": 1}


def tokens(q, advantage, rl=None, ce=None, ref_kl=None):
    zero = [0.0] * len(q)
    streams = (q, advantage, rl or zero, ce or zero, ref_kl or zero)
    return Tokens(*(torch.tensor(stream, dtype=torch.float64) for stream in streams))


def run(logprobs, given_tokens, denominators, config=DPPO):
    l = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)  # noqa: E741
    loss, measured = token_loss(l, torch.zeros_like(l), given_tokens, denominators, config)
    loss.backward()
    return loss.item(), l.grad.tolist(), measured


def test_rl_by_hand():
    l, q = [math.log(0.5), math.log(0.5), math.log(0.1)], [math.log(0.4), math.log(0.2), math.log(0.4)]  # noqa: E741
    # Ratios 1.25, 2.5, 0.25. The second rose by 0.3 with a positive advantage, the third fell by 0.3 with a negative
    # one: both are masked and keep only the squared log ratio. The first has weight 2.
    given_tokens = tokens(q, [1.0, 3.0, -2.0], rl=[2.0, 1.0, 1.0])
    loss, gradient, measured = run(l, given_tokens, {"rl": 4, "ce": 0, "ref_kl": 0})
    d = [math.log(1.25), math.log(2.5), math.log(0.25)]
    expected = (2 * (-1.25 + 1e-3 * d[0] ** 2) + 1e-3 * d[1] ** 2 + 1e-3 * d[2] ** 2) / 4
    assert loss == pytest.approx(expected, abs=1e-15)
    assert gradient == pytest.approx([2 * (-1.25 + 2e-3 * d[0]) / 4, 2e-3 * d[1] / 4, 2e-3 * d[2] / 4], abs=1e-15)
    assert {
        name: float(measured.sums[name]) for name in ("masked_positive", "masked_negative", "positive", "negative")
    } == {
        "masked_positive": 1.0,
        "masked_negative": 1.0,
        "positive": 2.0,
        "negative": 1.0,
    }
    kl = [r - 1 - math.log(r) for r in (1.25, 2.5, 0.25)]
    assert float(measured.sums["mismatch_kl"]) == pytest.approx(sum(kl), abs=1e-14)
    assert float(measured.maxima["mismatch_kl"]) == pytest.approx(max(kl), abs=1e-14)


def test_trust_region_looks_at_the_sign_and_the_difference():
    l, q = torch.tensor([0.5, 0.5, 0.1, 0.1, 0.5]).log(), [0.2, 0.2, 0.4, 0.4, 0.31]  # noqa: E741
    given_tokens = tokens([math.log(p) for p in q], [1.0, -1.0, 1.0, -1.0, 1.0], rl=[1.0] * 5)
    high, low = outside_trust_region(l.double(), given_tokens, DPPO)
    assert (high.tolist(), low.tolist()) == ([True, False, False, False, False], [False, False, False, True, False])


def test_ce_gradient_is_minus_weight_over_tokens_whatever_the_engine_said():
    loss, gradient, measured = run([-3.0, -0.25], tokens([0.0, -500.0], [0.0, 0.0], ce=[1.0, 0.5]), CE_ONLY)
    assert loss == pytest.approx((3.0 + 0.125) / 2)
    assert gradient == [-0.5, -0.25]
    assert (float(measured.sums["mismatch_kl"]), float(measured.maxima["ce_nll"])) == (0.0, 3.0)


def test_ref_kl_is_the_policy_gradient_of_its_signal():
    loss, gradient, _ = run([-1.0], tokens([-1.5], [-0.7], ref_kl=[1.0]), {"rl": 0, "ce": 0, "ref_kl": 3})
    assert (loss, gradient[0]) == pytest.approx((0.7 * math.exp(0.5) / 3,) * 2)


@pytest.mark.parametrize("engine_logprob", [-500.0, -1e30])
def test_a_token_outside_a_component_cannot_make_it_nan(engine_logprob):
    # Token 0 has ce weight only, and the engine all but ruled it out: exp(l - q) is infinite.
    given_tokens = tokens([engine_logprob, -1.0], [5.0, 1.0], rl=[0.0, 1.0], ce=[1.0, 0.0])
    loss, gradient, _ = run([-0.5, -1.0], given_tokens, {"rl": 1, "ce": 1, "ref_kl": 0})
    assert (loss, gradient) == (-1.0 + 0.5, [-1.0, -1.0])


def test_a_masked_token_with_an_infinite_ratio_gives_no_nan():
    given_tokens = tokens([-800.0], [1.0], rl=[1.0])
    loss, gradient, _ = run([-0.1], given_tokens, {"rl": 1, "ce": 0, "ref_kl": 0})
    assert loss == pytest.approx(1e-3 * 799.9**2)
    assert gradient == pytest.approx([2e-3 * 799.9])


def test_without_the_mask_the_same_token_would_be_infinite():
    _, gradient, _ = run([-0.1], tokens([-800.0], [-1.0], rl=[1.0]), {"rl": 1, "ce": 0, "ref_kl": 0})
    assert gradient == [math.inf]


@st.composite
def token_rows(draw):
    size = draw(st.integers(1, 12))

    def column(values):
        return draw(st.lists(values, min_size=size, max_size=size))

    logprob = st.floats(-8, -0.01)
    component = column(st.sampled_from(["rl", "ce", "ref_kl", "rl+ce", "none"]))
    weight = column(st.sampled_from([0.25, 1.0, -0.5]))
    weights = {
        name: [w if name in part.split("+") else 0.0 for w, part in zip(weight, component, strict=True)]
        for name in ("rl", "ce", "ref_kl")
    }
    return column(logprob), column(logprob), column(st.sampled_from([-1.5, 0.0, 0.4])), weights


def reference(l, q, advantage, weights, denominators, config):  # noqa: E741
    """The loss, one token after the other, as the formula reads."""
    total = l.new_zeros(())
    for t in range(len(l)):
        ratio = torch.exp(l[t] - q[t])
        if weights["rl"][t] != 0:
            moved = math.exp(l[t].item()) - math.exp(q[t])
            masked = (advantage[t] > 0 and moved > config.mask_high) or (advantage[t] < 0 and -moved > config.mask_low)
            policy = 0.0 if masked else -advantage[t] * ratio
            total = total + weights["rl"][t] * (policy + config.kl_tau * (l[t] - q[t]) ** 2) / denominators["rl"]
        if weights["ce"][t] != 0:
            total = total - weights["ce"][t] * l[t] / denominators["ce"]
        if weights["ref_kl"][t] != 0:
            total = total - weights["ref_kl"][t] * advantage[t] * ratio / denominators["ref_kl"]
    return total


@settings(max_examples=150, deadline=None)
@given(token_rows(), st.sampled_from([DPPO, DppoLoss(mask_low=0.01, mask_high=0.05, kl_tau=0.5)]))
def test_equals_the_slow_reference(row, config):
    logprobs, q, advantage, weights = row
    denominators = {"rl": 7, "ce": 3, "ref_kl": 2}
    loss, gradient, _ = run(logprobs, tokens(q, advantage, **weights), denominators, config)
    l = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)  # noqa: E741
    slow = reference(l, q, advantage, weights, denominators, config)
    assert loss == pytest.approx(slow.item(), rel=1e-12, abs=1e-12)
    if slow.requires_grad:
        slow.backward()
        assert gradient == pytest.approx(l.grad.tolist(), rel=1e-12, abs=1e-12)
    else:
        assert gradient == [0.0] * len(logprobs)


def test_no_tokens_give_a_zero_with_a_graph():
    l = torch.zeros(0, requires_grad=True)  # noqa: E741
    nothing = Tokens(*(torch.zeros(0),) * 5)
    loss, measured = token_loss(l, l.detach(), nothing, {"rl": 5, "ce": 0, "ref_kl": 0}, DPPO)
    loss.backward()
    assert (loss.item(), l.grad.shape) == (0.0, (0,))
    assert {float(value) for value in (*measured.sums.values(), *measured.maxima.values())} == {0.0}
