"""The losses of the rl component, distinguished by `type`, and the settings of the other components.

For a token l is the learner's log-prob, q the engine's, r = exp(l - q) the importance ratio and A the advantage. The
formulas are in tasks/learner/loss.py.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from configs.fields import Section, later, version_of


class TruncatedImportance(Section):
    """Truncated importance sampling: a token's gradient is weighed by min(R, cap) in place of the loss' own ratio."""

    level: Literal["token", "sequence"] = "token"
    """What R is: the token's own ratio r, or the product of the ratios of its sequence's rl tokens."""
    cap: float = Field(2.0, gt=0)
    """The most that a weight may be."""


class SequenceMask(Section):
    """Leaves whole sequences out of the rl component where engine and learner disagree too much on them."""

    ratio: Literal["geometric", "extremes"] = "geometric"
    """What is judged: the geometric mean of the ratios of a sequence's rl tokens, or the smallest and the largest."""
    low: float | None = Field(0.1, gt=0)
    """A sequence is left out when the mean, or the smallest ratio, is below this; null sets no bound."""
    high: float | None = Field(10.0, gt=0)
    """A sequence is left out when the mean, or the largest ratio, is above this; null sets no bound."""


class LossSection(Section):
    """What the losses of the rl component have in common."""

    kl_tau: float = Field(0.0, ge=0)
    """Weight of the squared log importance ratio, on masked tokens too."""
    tis: TruncatedImportance | None = None
    """Truncated importance sampling; null weighs with the loss' own ratio, without a cap."""
    sequence_mask: SequenceMask | None = None
    """Mask of whole sequences by mismatch; null keeps them all."""


class DppoLoss(LossSection):
    """Masks tokens whose probability moved too far in the direction in which the advantage pushes."""

    type: Literal["dppo"] = "dppo"
    mask_low: float = Field(0.2, gt=0)
    """A token of negative advantage is masked when the probability fell by more than this."""
    mask_high: float = Field(0.2, gt=0)
    """A token of positive advantage is masked when the probability rose by more than this."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log importance ratio."""


class IpoLoss(LossSection):
    """Masks tokens whose probability moved too far, in any direction and for any advantage."""

    type: Literal["ipo"] = "ipo"
    threshold: float = Field(0.1, gt=0)
    """A token is masked when engine and learner differ in its probability by more than this."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log importance ratio."""


class PpoLoss(LossSection):
    """Clips the token's ratio, and takes the worse of clipped and unclipped."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Ratios of negative advantage are clipped at 1 minus this."""
    clip_high: float = Field(0.2, gt=0)
    """Ratios of positive advantage are clipped at 1 plus this; more than `clip_low` is DAPO's clip-higher (0.28)."""
    dual_clip: float | None = later(None, gt=1)
    """Ratios of negative advantage are clipped from above at this (dual clip; 3 in verl); null sets no such bound."""


class CispoLoss(LossSection):
    """Clips the weight of the gradient and so leaves no token without one."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, gt=0, le=1)
    """Weights are at least 1 minus this; 1 sets no lower bound, as in the paper."""
    clip_high: float = Field(4.0, gt=0)
    """Weights are at most 1 plus this."""


class GspoLoss(LossSection):
    """Clips the ratio of the whole sequence, the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """Sequence ratios of negative advantage are clipped at 1 minus this."""
    clip_high: float = Field(4e-4, gt=0)
    """Sequence ratios of positive advantage are clipped at 1 plus this."""


class DpoLoss(LossSection):
    """Direct preference optimization, of the pairs that the algorithm `preferences` makes."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0)
    """How much a log ratio of policy and reference counts: the greater, the nearer the policy stays."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability with which a pair is taken to be the wrong way round (conservative DPO)."""


class KtoLoss(LossSection):
    """Kahneman-Tversky optimization: chosen rollouts are desirable, rejected ones undesirable, each by itself."""

    type: Literal["kto"] = "kto"
    beta: float = Field(0.1, gt=0)
    """How much a log ratio of policy and reference counts."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of a chosen rollout."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of a rejected rollout."""


class CustomLoss(LossSection):
    """Your own function."""

    type: Literal["custom"] = "custom"
    function: str = Field(min_length=1)
    """Import path, `package.module:function`; it is called with the rl tokens of a packed row and the arguments."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it, plain values."""
    version: str = version_of("function")
    """Name and version of its package, or the digest of its file; filled in when resolved."""


LossConfig = Annotated[
    DppoLoss | IpoLoss | PpoLoss | CispoLoss | GspoLoss | DpoLoss | KtoLoss | CustomLoss,
    Field(discriminator="type"),
]


def is_elementwise(loss: LossConfig) -> bool:
    """Return whether the loss of a token depends on the log-prob of no other token.

    A sequence's ratio does, and of a custom function nobody knows.
    """
    of_sequences = loss.sequence_mask is not None or (loss.tis is not None and loss.tis.level == "sequence")
    return not of_sequences and isinstance(loss, DppoLoss | IpoLoss | PpoLoss | CispoLoss | DpoLoss | KtoLoss)


class RefKlConfig(Section):
    """The trust region of the ref_kl component: one-sided, in the direction in which the signal pushes."""

    mask_low: float = Field(0.2, gt=0)
    """A token that the reference likes less than the learner is masked when the probability fell by more than this."""
    mask_high: float = Field(0.2, gt=0)
    """A token that the reference likes more than the learner is masked when the probability rose by more than this."""
