"""The losses of the rl component, told apart by `type`, and what the other components can be told."""

from typing import Literal

from pydantic import Field

from configs.fields import Section


class DppoLoss(Section):
    type: Literal["dppo"] = "dppo"
    mask_low: float = Field(0.2, gt=0)
    """A token of negative advantage is masked when the probability fell by more than this."""
    mask_high: float = Field(0.2, gt=0)
    """A token of positive advantage is masked when the probability rose by more than this."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log importance ratio."""


LossConfig = DppoLoss
