"""The sections of replays and of the gate before training."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.fields import Section, later, operational

StageName = Literal["assignment", "rollout", "judging", "filtering", "advantage", "packing", "training"]
ORDER: tuple[StageName, ...] = ("assignment", "rollout", "judging", "filtering", "advantage", "packing", "training")
"""The stages that a replay may begin and end with."""
MIN_WINDOW = 5
"""Fewest steps of a trend: a score without one rises four times in a row in a run of five by chance, in 1 of 120."""


class ReplayConfig(Section):
    run: str = operational("")
    """The run whose recorded work is replayed; it is never changed."""
    from_stage: StageName = operational("training")
    """The first stage that is computed again; for the stages before it the recorded work is used."""
    until: StageName = operational("training")
    """The last stage that is computed again."""
    first_step: int = operational(0, ge=0)
    """The first step that is replayed."""
    last_step: int | None = operational(None, ge=0)
    """The step before which the replay ends; null takes all that are recorded."""
    policies: Literal["own", "recorded"] = operational("own")
    """`own`: each step starts from the policy that the replay made before. `recorded`: every step starts from the
    recorded policy, so that each step shows its own effect alone."""
    regrade: bool = operational(False)
    """Whether recorded traces are scored again with the reward functions of today before they are filtered."""
    graders: str = operational("")
    """Digest of the reward functions' source; filled in where traces are scored again."""
    weights: str = operational("")
    """Digest of the weights in model.path where the first step starts from those; empty: the recorded ones."""
    quarantines: tuple[str, ...] = operational(())
    """Ids of the quarantines whose rollouts are left out; those that existed when the replay was first started."""


def replayed_stages(replay: ReplayConfig) -> tuple[StageName, ...]:
    """Return the stages that a replay computes again, in order."""
    return ORDER[ORDER.index(replay.from_stage) : ORDER.index(replay.until) + 1]


def needs_weights(replay: ReplayConfig) -> bool:
    """Tell whether a stage that a replay computes again samples with weights or trains them."""
    return not {"rollout", "training"}.isdisjoint(replayed_stages(replay))


class NoGate(Section):
    type: Literal["none"] = "none"


class PauseGate(Section):
    type: Literal["pause"] = "pause"
    """A person approves each batch in the Prefect UI before it is trained on."""
    every: int = operational(1, ge=1)
    """Check every n-th step, the first included."""
    timeout_seconds: float = operational(86_400.0, gt=0)
    """Longest wait for the person; then the run ends and can be resumed."""


class RuleGate(Section):
    type: Literal["rule"] = "rule"
    rule: str = "trainable_ratio > 0.1"
    """A condition in SQL over the figures of the batch, for example `trainable_ratio > 0.1`; the run stops if it does
    not hold."""
    window: int = later(0, ge=0)
    """Steps over which `score_trend` says whether a score rises, the batch's included; 0 reads no step before."""
    every: int = operational(1, ge=1)
    """Check every n-th step, the first included."""

    @model_validator(mode="after")
    def _has_window(self) -> Self:
        if "score_trend" in self.rule and self.window < MIN_WINDOW:
            raise ValueError(
                f"score_trend is a trend over gate.window steps, which is {self.window}: set gate.window to at least "
                f"{MIN_WINDOW}, or take score_trend out of the rule"
            )
        return self


GateConfig = Annotated[NoGate | PauseGate | RuleGate, Field(discriminator="type")]
