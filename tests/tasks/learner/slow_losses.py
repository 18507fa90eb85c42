"""The loss as its formulas read, one token after the other, to hold the packed tensor path against."""

import math
from collections import Counter
from dataclasses import dataclass

import torch

from configs.losses import RefKlConfig
from tasks.learner.loss import Objective, WeightedTokens, token_loss


@dataclass(frozen=True)
class Token:
    """One weighted token: learner and engine log-prob, signal, weights by component, number of its sequence."""

    l: float  # noqa: E741
    q: float
    advantage: float
    rl: float = 0.0
    ce: float = 0.0
    ref_kl: float = 0.0
    segment: int = 0


def packed(row, denominators, loss, ref_kl=None):
    """Return loss, gradient and what was measured by the packed path, in float64.

    A component that is not among the denominators has no tokens.
    """
    l = torch.tensor([token.l for token in row], dtype=torch.float64, requires_grad=True)  # noqa: E741
    names = ("q", "advantage", "rl", "ce", "ref_kl")
    streams = [torch.tensor([getattr(token, name) for token in row], dtype=torch.float64) for name in names]
    segments = torch.tensor([token.segment for token in row], dtype=torch.int64)
    count = 1 + max((token.segment for token in row), default=0)
    objective = Objective(loss, ref_kl or RefKlConfig())
    total, measured = token_loss(
        l, torch.zeros_like(l), WeightedTokens(*streams, segments, count), Counter(denominators), objective
    )
    total.backward()
    return total.item(), l.grad.tolist(), measured


def slow(l, row, denominators, loss, ref_kl=None):  # noqa: E741
    """Return the loss at log-probs `l`; ratios and masks without gradient are those at the log-probs of `row`.

    `l` are numbers or scalars with gradient. A masked sequence, a mask and a stopped gradient thus stay as they are
    where `l` is moved a little, as finite differences need it.
    """
    total = 0.0
    for now, token in zip(l, row, strict=True):
        sequence = [other for other in row if other.segment == token.segment and other.rl != 0]
        if token.rl != 0 and within(sequence, loss.sequence_mask):
            drift = loss.kl_tau * (now - token.q) ** 2
            total = total + token.rl * (rl_term(now, token, sequence, loss) + drift) / denominators["rl"]
        if token.ce != 0:
            total = total - token.ce * now / denominators["ce"]
        if token.ref_kl != 0:
            total = total + token.ref_kl * ref_kl_term(now, token, ref_kl or RefKlConfig()) / denominators["ref_kl"]
    return total


def within(sequence, mask):
    """Tell whether a sequence's mismatch is within the bounds of a sequence mask."""
    if mask is None:
        return True
    drifts = [token.l - token.q for token in sequence]
    if mask.ratio == "geometric":
        drifts = [math.fsum(drifts) / len(drifts)]
    low, high = (None if bound is None else math.log(bound) for bound in (mask.low, mask.high))
    return (low is None or min(drifts) >= low) and (high is None or max(drifts) <= high)


def rl_term(now, token, sequence, loss):
    """Return T of one token."""
    advantage, moved = token.advantage, math.exp(token.l) - math.exp(token.q)
    drifts = [other.l - other.q for other in sequence]
    if loss.type == "dppo":
        masked = (advantage > 0 and moved > loss.mask_high) or (advantage < 0 and -moved > loss.mask_low)
        return 0.0 if masked else -advantage * weight(now, token, drifts, loss, token.l - token.q)
    if loss.type == "ipo":
        return 0.0 if abs(moved) > loss.threshold else -advantage * weight(now, token, drifts, loss, token.l - token.q)
    if loss.type == "cispo":
        ratio = min(max(capped(token, drifts, loss, token.l - token.q), 1 - loss.clip_low), 1 + loss.clip_high)
        return -advantage * ratio * now
    own = token.l - token.q if loss.type == "ppo" else math.fsum(drifts) / len(drifts)
    ratio = math.exp(own)
    bound = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
    if advantage < 0 and getattr(loss, "dual_clip", None) is not None and ratio > loss.dual_clip:
        return -advantage * loss.dual_clip
    if advantage * bound < advantage * ratio:
        return -advantage * bound
    return -advantage * weight(now, token, drifts, loss, own)


def weight(now, token, drifts, loss, own):
    """Return the importance weight with the gradient of the log-prob times itself."""
    return capped(token, drifts, loss, own) * exp(now - token.l)


def capped(token, drifts, loss, own):
    """Return the importance weight as a number."""
    if loss.tis is None:
        return math.exp(own)
    log_ratio = token.l - token.q if loss.tis.level == "token" else math.fsum(drifts)
    return math.exp(min(log_ratio, math.log(loss.tis.cap)))


def ref_kl_term(now, token, ref_kl):
    """Return the live reverse-KL term of one token."""
    signal, moved = token.advantage - (token.l - token.q), math.exp(token.l) - math.exp(token.q)
    masked = (signal > 0 and moved > ref_kl.mask_high) or (signal < 0 and -moved > ref_kl.mask_low)
    return 0.0 if masked else -signal * exp(now - token.q)


def exp(value):
    """Return exp of a number or of a scalar with gradient."""
    return value.exp() if isinstance(value, torch.Tensor) else math.exp(value)
