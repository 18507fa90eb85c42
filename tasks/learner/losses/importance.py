"""Importance weights of tokens that the engine sampled and the learner trains on, and the surrogates built on them."""

import math

import torch
from torch import Tensor

from tasks.learner.losses.tokens import RlTokens, Term


def importance_weights(rl: RlTokens, where: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return detached importance weights (N,), 1 outside `where`, and where truncation cut them down.

    Without truncated importance sampling the weight is exp(`own`), the loss' own log ratio, by default that of the
    token. With it the weight is min(R, cap), R the token's ratio or the product over its sequence. Sources: Ionides
    2008, "Truncated Importance Sampling"; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training" (token); Liu et al. 2025, "When Speed Kills Stability" (sequence). There a truncated ratio of the
    learner before the update to the engine stands beside the loss' ratio. Here one ratio, of the learner to the engine,
    is both, so the truncated one takes its place as weight; trust regions and clips still go by the loss' own.
    """
    log_weights = rl.log_ratio if own is None else own
    if rl.tis is not None:
        log_weights = rl.log_ratio if rl.tis.level == "token" else rl.sequence_log_ratio
    # Selected before the exp: zero times the infinity of a token that does not count would be NaN.
    weights = torch.where(where, log_weights, 0.0).exp()
    if rl.tis is None:
        return weights, torch.zeros_like(where)
    return weights.clamp(max=rl.tis.cap), where & (weights > rl.tis.cap)


def surrogate(rl: RlTokens, masked: Tensor, own: Tensor | None = None) -> Term:
    """Return -A w on tokens that are not `masked` and zero on others; w has the importance weight as value, and as
    gradient the weight times that of the log-prob."""
    pushed = ~masked & (rl.advantages != 0)
    weights, truncated = importance_weights(rl, pushed, own)
    # One in value, and in gradient that of the log-prob.
    carrier = (rl.logprobs - rl.logprobs.detach()).exp()
    return Term(-torch.where(pushed, rl.advantages, 0.0) * (weights * carrier), masked, truncated)


def clipped_surrogate(rl: RlTokens, log_ratio: Tensor, low: float, high: float, dual: float = math.inf) -> Term:
    """Return -min(A r, A clip(r, 1 - low, 1 + high)) for a detached `log_ratio` (N,), that of a token or a sequence.

    Where A is negative that is no more than -A `dual`. Where the value is that of a bound, it is a constant: those
    tokens are masked.
    """
    ratio = log_ratio.exp()
    highest = torch.full_like(ratio, 1 + high).masked_fill(rl.advantages < 0, dual)
    too_high = rl.member & (rl.advantages != 0) & (ratio > highest)
    too_low = rl.member & (rl.advantages < 0) & (ratio < 1 - low)
    inside = surrogate(rl, too_high | too_low, log_ratio)
    bound = torch.where(inside.masked, ratio.clamp(min=1 - low).minimum(highest), 0.0)
    return Term(inside.values - rl.advantages * bound, inside.masked, inside.truncated)
