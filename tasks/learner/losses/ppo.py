"""PPO: the token's ratio is clipped, and the worse of clipped and unclipped counts."""

import math

from configs.losses import PpoLoss
from tasks.learner.losses.importance import clipped_surrogate
from tasks.learner.losses.tokens import RlTokens, Term


def ppo(rl: RlTokens, settings: PpoLoss) -> Term:
    """Return -min(A r, A clip(r, 1 - clip_low, 1 + clip_high)), and no more than -A dual_clip where A is negative.

    Sources: Schulman et al. 2017, arXiv 1707.06347, eq. 7; bounds apart (clip-higher) from DAPO, arXiv 2503.14476,
    eq. 8; dual clip from Ye et al. 2019, arXiv 1912.09729, eq. 5.
    """
    dual = math.inf if settings.dual_clip is None else settings.dual_clip
    return clipped_surrogate(rl, rl.log_ratio, settings.clip_low, settings.clip_high, dual)
