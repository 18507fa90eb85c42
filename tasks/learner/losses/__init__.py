"""The losses of the rl component by `training.loss.type`: functions of a row's rl tokens and the loss's settings."""

from collections.abc import Callable
from typing import Any

from tasks.learner.losses.cispo import cispo
from tasks.learner.losses.custom import custom
from tasks.learner.losses.dppo import dppo
from tasks.learner.losses.gspo import gspo
from tasks.learner.losses.ipo import ipo
from tasks.learner.losses.ppo import ppo
from tasks.learner.losses.preference import preference
from tasks.learner.losses.tokens import RlTokens, Term

LOSSES: dict[str, Callable[[RlTokens, Any], Term]] = {
    "dppo": dppo,
    "ipo": ipo,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "dpo": preference,
    "kto": preference,
    "custom": custom,
}
