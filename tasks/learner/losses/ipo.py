"""IPO: a symmetric trust region on the difference of probabilities."""

from configs.losses import IpoLoss
from tasks.learner.losses.importance import surrogate
from tasks.learner.losses.tokens import RlTokens, Term


def ipo(rl: RlTokens, settings: IpoLoss) -> Term:
    """Return -m A r: m is 0 where |exp(l) - exp(q)| exceeds the threshold, whatever the sign of A, else 1.

    Source: "INTELLECT Policy Optimization", documentation of prime-rl, section IPO (threshold 0.3).
    """
    return surrogate(rl, rl.member & (rl.probability_change.abs() > settings.threshold))
