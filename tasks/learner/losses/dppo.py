"""DPPO: a trust region on the difference of probabilities, one-sided by the sign of the advantage."""

from configs.losses import DppoLoss
from tasks.learner.losses.importance import surrogate
from tasks.learner.losses.tokens import RlTokens, Term


def dppo(rl: RlTokens, settings: DppoLoss) -> Term:
    """Return -m A r: m is 0 where A > 0 and the probability rose too far, or A < 0 and it fell too far, else 1.

    Source: Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879 (binary total
    variation).
    """
    too_high = (rl.advantages > 0) & (rl.probability_change > settings.mask_high)
    too_low = (rl.advantages < 0) & (-rl.probability_change > settings.mask_low)
    return surrogate(rl, rl.member & (too_high | too_low))
