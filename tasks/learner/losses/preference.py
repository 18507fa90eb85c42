"""DPO and KTO: a weight on every token's log-prob."""

import torch

from configs.losses import DpoLoss, KtoLoss
from tasks.learner.losses.tokens import RlTokens, Term


def preference(rl: RlTokens, settings: DpoLoss | KtoLoss) -> Term:
    """Return -A l, whose gradient is that of the loss where A is what `tasks.learner.preferences` makes of pairs."""
    none = torch.zeros_like(rl.member)
    return Term(-rl.advantages * rl.logprobs, none, none)
