"""CISPO: the weight of the gradient is clipped, the gradient never is."""

import torch

from configs.losses import CispoLoss
from tasks.learner.losses.importance import importance_weights
from tasks.learner.losses.tokens import RlTokens, Term


def cispo(rl: RlTokens, settings: CispoLoss) -> Term:
    """Return -A c l, c the detached importance weight clipped to [1 - clip_low, 1 + clip_high].

    No token is masked; those whose weight was clipped from above count as truncated. Sources: MiniMax-M1, arXiv
    2506.13585, eq. 4 and 5, where there is no lower bound; the upper bound of 5 from ScaleRL, arXiv 2510.13786.
    """
    weights, truncated = importance_weights(rl, rl.advantages != 0)
    coefficients = weights.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    truncated = truncated | (weights > 1 + settings.clip_high)
    return Term(-rl.advantages * coefficients * rl.logprobs, torch.zeros_like(rl.member), truncated)
