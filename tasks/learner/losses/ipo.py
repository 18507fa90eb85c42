"""IPO: a symmetric trust region on the difference of probabilities."""

from configs.losses import IpoLoss
from tasks.learner.losses.importance import surrogate
from tasks.learner.losses.tokens import RlTokens, Term


def ipo(rl: RlTokens, settings: IpoLoss) -> Term:
    """Return -m A r: m is 0 where |exp(l) - exp(q)| exceeds the threshold, whatever the sign of A, else 1.

    Source: prime-rl, `ipo_loss_fn` in src/prime_rl/trainer/rl/loss.py; `IPOLossConfig` in its configs/trainer.py has a
    threshold of 0.1.
    """
    return surrogate(rl, rl.member & (rl.probability_change.abs() > settings.threshold))
