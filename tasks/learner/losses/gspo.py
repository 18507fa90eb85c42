"""GSPO: importance ratio and clip of the whole sequence."""

from configs.losses import GspoLoss
from tasks.learner.losses.importance import clipped_surrogate
from tasks.learner.losses.tokens import RlTokens, Term


def gspo(rl: RlTokens, settings: GspoLoss) -> Term:
    """Return -min(A s, A clip(s, 1 - clip_low, 1 + clip_high)) on every token, s the sequence's ratio.

    s is exp of the mean log ratio over the sequence's rl tokens; a token carries the value of s and the gradient of its
    own log-prob (GSPO-token), which is the paper's gradient where a sequence has one advantage. Tokens of one sequence
    are added up and divided by the rl tokens of the update, as in all losses here; the paper takes the mean over the
    tokens of a sequence and then over sequences. Source: Zheng et al. 2025, arXiv 2507.18071, eq. 5, 7, 13 and 14.
    """
    return clipped_surrogate(rl, rl.mean_log_ratio, settings.clip_low, settings.clip_high)
