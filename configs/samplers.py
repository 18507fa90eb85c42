"""Which examples a step tries: the samplers of the assignment stage, told apart by `type`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from configs.fields import Section


class StandardSampler(Section):
    """Each environment's examples come in epochs: all of them once, in an order of their own, then all again."""

    stateful: ClassVar[bool] = False
    """Whether it goes by what the steps before came to, in table `difficulties`."""
    type: Literal["standard"] = "standard"


class DifficultyPool(Section):
    """The examples whose last group earned a mean reward above the pool before and up to a threshold."""

    name: str = Field(min_length=1)
    """What the pool is called."""
    threshold: float
    """Highest mean reward of an example in it; the last pool has the examples above its own, too."""
    weight: float = Field(gt=0)
    """How much likelier an example of it is drawn, relative to the other pools' weights."""


class DifficultyPoolsSampler(Section):
    """Examples are drawn by weight: how hard one was when it was tried last says to which pool it belongs."""

    stateful: ClassVar[bool] = True
    type: Literal["difficulty_pools"] = "difficulty_pools"
    pools: tuple[DifficultyPool, ...] = Field(
        (
            DifficultyPool(name="hard", threshold=0.25, weight=0.2),
            DifficultyPool(name="normal", threshold=0.75, weight=1.0),
            DifficultyPool(name="easy", threshold=1.0, weight=0.2),
        ),
        min_length=1,
    )
    """The pools, from hard to easy."""
    unseen_weight: float = Field(1.0, gt=0)
    """The weight of an example that was not scored yet."""

    @field_validator("pools")
    @classmethod
    def _rising(cls, pools: tuple[DifficultyPool, ...]) -> tuple[DifficultyPool, ...]:
        thresholds = [pool.threshold for pool in pools]
        if thresholds != sorted(set(thresholds)):
            raise ValueError(f"the thresholds {thresholds} must rise from pool to pool, so that no pool is empty")
        if len({pool.name for pool in pools}) < len(pools):
            raise ValueError(f"the names {[pool.name for pool in pools]} must differ")
        return pools


SamplerConfig = Annotated[StandardSampler | DifficultyPoolsSampler, Field(discriminator="type")]
