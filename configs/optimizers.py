"""Optimizers and schedules of the learning rate: one section each, told apart by `type`."""

from typing import Annotated, Literal

from pydantic import Field

from configs.fields import Section


class OptimizerSection(Section):
    """What every optimizer's section says of it."""

    type: str

    @property
    def state_kind(self) -> str:
        """What its saved state is; an optimizer of another kind cannot go on from it. Empty keeps none."""
        return self.type


class AdamwOptimizer(OptimizerSection):
    """AdamW over all parameters, by `betas`, `epsilon` and `weight_decay` of the training section."""

    type: Literal["adamw"] = "adamw"


class MuonOptimizer(OptimizerSection):
    """Muon over the matrices of the layers; AdamW over embeddings, the output head, norms, biases and all else."""

    type: Literal["muon"] = "muon"
    learning_rate: float | None = Field(None, gt=0)
    """Peak learning rate of Muon's matrices, on the same schedule; null is `training.learning_rate`."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Share of the old momentum in the new one."""
    nesterov: bool = True
    """Whether the momentum looks one gradient ahead."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton-Schulz iterations that make the update orthogonal."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of an update of A rows and B columns: match_rms_adamw is 0.2 sqrt(max(A, B)), so that AdamW's learning rate
    fits; original is sqrt(max(1, A / B))."""


class SignSgdOptimizer(OptimizerSection):
    """The sign of the gradient's moving average (Signum), or of the gradient itself (signSGD), over all parameters."""

    type: Literal["sign_sgd"] = "sign_sgd"
    momentum: float = Field(0.9, ge=0, lt=1)
    """Share of the old average in the new one; 0 takes the gradient's own sign and keeps no state."""

    @property
    def state_kind(self) -> str:
        return self.type if self.momentum else ""


OptimizerConfig = Annotated[AdamwOptimizer | MuonOptimizer | SignSgdOptimizer, Field(discriminator="type")]


class ConstantSchedule(Section):
    """The peak after warm-up, for ever."""

    type: Literal["constant"] = "constant"


class LinearSchedule(Section):
    """A straight line from the end of warm-up to `decay_steps`; without `decay_steps` the rate stays at the peak."""

    type: Literal["linear"] = "linear"
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the peak that is left at `decay_steps` and after."""


class CosineSchedule(Section):
    """Half a cosine from the end of warm-up to `decay_steps`."""

    type: Literal["cosine"] = "cosine"
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the peak that is left at `decay_steps` and after."""


class WsdSchedule(Section):
    """Warm-up, stable, decay: the peak until shortly before `decay_steps`, then down."""

    type: Literal["wsd"] = "wsd"
    final_steps: int = Field(ge=1)
    """Steps of the decay; it begins at `decay_steps - final_steps`."""
    shape: Literal["sqrt", "linear"] = "sqrt"
    """How it falls over the decay's share x that is done: sqrt is 1 - sqrt(x), linear is 1 - x."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the peak that is left at `decay_steps` and after."""


ScheduleConfig = Annotated[
    ConstantSchedule | LinearSchedule | CosineSchedule | WsdSchedule, Field(discriminator="type")
]
