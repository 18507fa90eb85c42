"""What the loss measures, by hand: which tokens count, in which precision; and what a custom loss is told."""

import math

import pytest
import torch

from configs.losses import CustomLoss, DppoLoss
from tasks.learner.loss import Objective, WeightedTokens, token_loss
from tests.fixtures.builders import exactly
from tests.tasks.learner.slow_losses import Token, packed

pytestmark = pytest.mark.engine

PATH = "tests.tasks.learner.own_losses"
DENOMINATORS = {"rl": 2, "ce": 1, "ref_kl": 0}


def measured(loss, entropies=(0.5, 0.25, 8.0)):
    """Loss and measures of two rl tokens, ratios 2 and 1/2, and one ce token."""
    columns = [[-0.5, -2.0, 0.0], [1.0, -1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    streams = [torch.tensor(column, dtype=torch.float32) for column in columns]
    tokens = WeightedTokens(*streams, torch.tensor([0, 0, 1]), 2)
    logprobs = torch.tensor([-0.5 + math.log(2), -2.0 - math.log(2), -3.0], requires_grad=True)
    return token_loss(logprobs, torch.tensor(entropies), tokens, DENOMINATORS, Objective(loss))


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
    _, found = measured(CustomLoss(function=f"{PATH}:all_masked"))
    assert found.masked.tolist() == [True, True, False]
    assert (float(found.sums["masked"]), float(found.sums["truncated"])) == (2, 2)


@pytest.mark.parametrize(
    ("function", "what"), [("a_sum", "of shape () for values"), ("a_number", "a float for values")]
)
def test_a_custom_loss_is_told_what_is_needed(function, what):
    said = (
        f"training.loss.function '{PATH}:{function}' gave {what}, where a tensor of shape (2,) is needed, one entry "
        "for each token; nothing was trained"
    )
    row = [Token(-1.0, -1.0, 1.0, rl=1.0), Token(-2.0, -1.0, 1.0, rl=1.0)]
    with pytest.raises(ValueError, match=exactly(said)):
        packed(row, DENOMINATORS, CustomLoss(function=f"{PATH}:{function}"))
