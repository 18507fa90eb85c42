"""The components of the loss by hand, what is measured on them, and the values that would give NaN."""

import math

import pytest
import torch

from configs.losses import CispoLoss, CustomLoss, DppoLoss, GspoLoss, IpoLoss, PpoLoss, RefKlConfig, TruncatedImportance
from tasks.learner.loss import Objective, WeightedTokens, token_loss
from tests.tasks.learner.slow_losses import Token, packed

pytestmark = [pytest.mark.engine, pytest.mark.essential]

DPPO = DppoLoss(mask_low=0.2, mask_high=0.2, kl_tau=1e-3)
LOSSES = [DPPO, IpoLoss(), PpoLoss(), CispoLoss(), GspoLoss()]
IDS = [loss.type for loss in LOSSES]
REF_KL_ONLY = {"ref_kl": 3}


def test_rl_by_hand():
    # Ratios 1.25, 2.5, 0.25. The second rose by 0.3 with a positive advantage, the third fell by 0.3 with a negative
    # one: both are masked and keep only the squared log ratio. The first has weight 2.
    row = [
        Token(math.log(0.5), math.log(0.4), 1.0, rl=2.0),
        Token(math.log(0.5), math.log(0.2), 3.0, rl=1.0),
        Token(math.log(0.1), math.log(0.4), -2.0, rl=1.0),
    ]
    loss, gradient, measured = packed(row, {"rl": 4}, DPPO)
    d = [math.log(1.25), math.log(2.5), math.log(0.25)]
    expected = (2 * (-1.25 + 1e-3 * d[0] ** 2) + 1e-3 * d[1] ** 2 + 1e-3 * d[2] ** 2) / 4
    assert loss == pytest.approx(expected, abs=1e-15)
    assert gradient == pytest.approx([2 * (-1.25 + 2e-3 * d[0]) / 4, 2e-3 * d[1] / 4, 2e-3 * d[2] / 4], abs=1e-15)
    counted = ("masked", "masked_positive", "masked_negative", "positive", "negative", "truncated")
    assert [float(measured.sums[name]) for name in counted] == [2, 1, 1, 2, 1, 0]


def measured(loss, entropies=(0.5, 0.25, 8.0)):
    """Loss and measures of two rl tokens, ratios 2 and 1/2, and one ce token."""
    columns = [[-0.5, -2.0, 0.0], [1.0, -1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    streams = [torch.tensor(column, dtype=torch.float32) for column in columns]
    tokens = WeightedTokens(*streams, torch.tensor([0, 0, 1]), 2)
    logprobs = torch.tensor([-0.5 + math.log(2), -2.0 - math.log(2), -3.0], requires_grad=True)
    return token_loss(logprobs, torch.tensor(entropies), tokens, {"rl": 2, "ce": 1, "ref_kl": 0}, Objective(loss))


def test_every_sum_and_maximum_by_hand():
    _, found = measured(DppoLoss(mask_low=9.0, mask_high=0.1, kl_tau=0.0))
    rose, fell = 1 - math.log(2), -0.5 + math.log(2)
    assert {name: float(value) for name, value in found.sums.items()} == pytest.approx(
        {
            "entropy": 0.75,
            "positive": 1,
            "negative": 1,
            "masked": 1,
            "masked_positive": 1,
            "masked_negative": 0,
            "truncated": 0,
            "ce_nll": 3,
            "ref_kl": 0,
            "ref_kl_masked": 0,
            "mismatch_kl": rose + fell,
            "mismatch_kl_squared": rose**2 + fell**2,
            "masked_mismatch_kl": rose,
            "masked_mismatch_kl_squared": rose**2,
            "unmasked_mismatch_kl": fell,
            "unmasked_mismatch_kl_squared": fell**2,
            "rl_loss": 0.5 / 2,
            "ce_loss": 3,
            "ref_kl_loss": 0,
        },
        abs=1e-6,
    )
    assert {name: float(value) for name, value in found.maxima.items()} == pytest.approx(
        {"ce_nll": 3, "mismatch_kl": rose, "masked_mismatch_kl": rose, "unmasked_mismatch_kl": fell}, abs=1e-6
    )
    assert found.masked.tolist() == [True, False, False]
    assert {value.dtype for value in (*found.sums.values(), *found.maxima.values())} == {torch.float64}
    assert not any(value.requires_grad for value in (*found.sums.values(), *found.maxima.values()))


def test_what_a_custom_loss_says_of_other_tokens_is_not_counted():
    _, found = measured(CustomLoss(function="tests.tasks.learner.own_losses:all_masked"))
    assert found.masked.tolist() == [True, True, False]
    assert (float(found.sums["masked"]), float(found.sums["truncated"])) == (2, 2)


def test_an_ipo_mask_without_a_sign_counts_as_masked():
    row = [Token(math.log(0.9), math.log(0.1), advantage, rl=1.0) for advantage in (1.0, -1.0, 0.0)]
    _, _, measured = packed(row, {"rl": 3}, IpoLoss())
    assert [float(measured.sums[name]) for name in ("masked", "masked_positive", "masked_negative")] == [3, 1, 1]


@pytest.mark.parametrize("loss", LOSSES, ids=IDS)
def test_ce_gradient_is_minus_weight_over_tokens_whatever_the_engine_said(loss):
    row = [Token(-3.0, 0.0, 0.0, ce=1.0), Token(-0.25, -500.0, 0.0, ce=0.5)]
    value, gradient, measured = packed(row, {"rl": 1, "ce": 2, "ref_kl": 1}, loss)
    assert value == pytest.approx((3.0 + 0.125) / 2)
    assert gradient == [-0.5, -0.25]
    assert (float(measured.sums["mismatch_kl"]), float(measured.maxima["ce_nll"])) == (0.0, 3.0)
    assert (float(measured.sums["ce_nll"]), float(measured.sums["ref_kl"])) == (3.25, 0.0)


def test_ref_kl_pushes_by_the_live_signal():
    # log pi_ref is -1.5 - 0.7 = -2.2 and l is -1: the signal is -1.2, where the one of sampling time is -0.7.
    loss, gradient, measured = packed([Token(-1.0, -1.5, -0.7, ref_kl=1.0)], REF_KL_ONLY, DPPO)
    assert (loss, gradient[0]) == pytest.approx((1.2 * math.exp(0.5) / 3,) * 2)
    assert float(measured.sums["ref_kl"]) == pytest.approx(1.2)
    assert float(measured.sums["ref_kl_masked"]) == 0


@pytest.mark.parametrize(
    ("p", "q", "ref", "masked"),
    [
        (0.5, 0.2, 0.9, True),  # rose by 0.3 and should rise
        (0.5, 0.2, 0.1, False),  # rose by 0.3 and should fall
        (0.1, 0.4, 0.05, True),  # fell by 0.3 and should fall
        (0.1, 0.4, 0.9, False),  # fell by 0.3 and should rise
        (0.5, 0.4, 0.9, False),  # rose by 0.1
        (0.4, 0.5, 0.1, False),  # fell by 0.1
    ],
)
def test_ref_kl_has_a_one_sided_trust_region(p, q, ref, masked):
    row = [Token(math.log(p), math.log(q), math.log(ref / q), ref_kl=1.0)]
    loss, gradient, measured = packed(row, REF_KL_ONLY, DPPO, RefKlConfig())
    expected = 0.0 if masked else -math.log(ref / p) * p / q / 3
    assert (loss, gradient[0]) == pytest.approx((expected, expected))
    assert bool(measured.sums["ref_kl_masked"]) == masked
    wide = packed(row, REF_KL_ONLY, DPPO, RefKlConfig(mask_low=0.9, mask_high=0.9))
    assert wide[1][0] == pytest.approx(-math.log(ref / p) * p / q / 3)


def test_ref_kl_s_bounds_are_inside_and_at_the_reference_nothing_is_masked():
    # Moved by exactly +1/4 and -1/4, each with the signal that pushes on, and with none.
    pairs = [(0.5, 0.25, 0.9), (0.25, 0.5, 0.1), (0.5, 0.25, 0.5), (0.25, 0.5, 0.25)]
    row = [Token(math.log(p), math.log(q), math.log(ref) - math.log(q), ref_kl=1.0) for p, q, ref in pairs]
    assert [token.advantage - (token.l - token.q) for token in row[2:]] == [0.0, 0.0]
    masked = [
        float(packed(row, REF_KL_ONLY, DPPO, RefKlConfig(mask_low=bound, mask_high=bound))[2].sums["ref_kl_masked"])
        for bound in (0.25, 0.2499)
    ]
    assert masked == [0.0, 2.0]


@pytest.mark.parametrize("loss", LOSSES, ids=IDS)
@pytest.mark.parametrize("engine_logprob", [-900.0, -1e30])
def test_a_token_outside_a_component_cannot_make_it_nan(engine_logprob, loss):
    # Token 0 has ce weight only, and the engine all but ruled it out: exp(l - q) is infinite.
    row = [Token(-0.5, engine_logprob, 5.0, ce=1.0), Token(-1.0, -1.0, 1.0, rl=1.0)]
    value, gradient, _ = packed(row, {"rl": 1, "ce": 1, "ref_kl": 0}, loss)
    assert (value, gradient) == (-1.0 + 0.5 if loss.type != "cispo" else 1.5, [-1.0, -1.0])


@pytest.mark.parametrize("loss", LOSSES, ids=IDS)
def test_an_infinite_ratio_that_is_masked_or_pushes_nothing_gives_no_nan(loss):
    plain = loss.model_copy(update={"kl_tau": 0.0})
    for advantage in (1.0, 0.0):
        value, gradient, _ = packed([Token(-0.1, -900.0, advantage, rl=1.0)], {"rl": 1}, plain)
        assert math.isfinite(value)
        assert gradient == [-5.0 if loss.type == "cispo" and advantage else 0.0]


@pytest.mark.parametrize("loss", LOSSES, ids=IDS)
def test_a_negative_advantage_has_no_bound_without_a_cap(loss):
    row = [Token(-0.1, -900.0, -1.0, rl=1.0)]
    _, gradient, _ = packed(row, {"rl": 1}, loss.model_copy(update={"kl_tau": 0.0}))
    unbounded = {"dppo": math.inf, "ipo": 0.0, "ppo": math.inf, "cispo": 5.0, "gspo": math.inf}
    assert gradient == [unbounded[loss.type]]
    for level in ("token", "sequence"):
        tis = TruncatedImportance(level=level, cap=2.0)
        _, gradient, _ = packed(row, {"rl": 1}, loss.model_copy(update={"tis": tis, "kl_tau": 0.0}))
        assert gradient == [0.0 if loss.type == "ipo" else 2.0]


@pytest.mark.parametrize("loss", LOSSES, ids=IDS)
def test_no_tokens_give_a_zero_with_a_graph(loss):
    l = torch.zeros(0, requires_grad=True)  # noqa: E741
    nothing = WeightedTokens(*(torch.zeros(0),) * 5, torch.zeros(0, dtype=torch.int64), 1)
    total, measured = token_loss(l, l.detach(), nothing, {"rl": 5, "ce": 0, "ref_kl": 0}, Objective(loss))
    total.backward()
    assert (total.item(), l.grad.shape) == (0.0, (0,))
    assert {float(value) for value in (*measured.sums.values(), *measured.maxima.values())} == {0.0}
