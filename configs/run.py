"""The config of a whole run, and the view of it that one stage may see."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator
from pydantic.fields import FieldInfo

from configs.fields import Section, operational
from configs.replay import GateConfig, NoGate, ReplayConfig
from configs.sections import (
    AdvantageConfig,
    AssignmentConfig,
    EnvironmentConfig,
    EvaluationConfig,
    FilteringConfig,
    GrpoConfig,
    ModelConfig,
    PackingConfig,
    RolloutConfig,
    SupervisedDataConfig,
    TrainingConfig,
)
from configs.services import EngineConfig, LearnerConfig, PrefectConfig, WandbConfig


class RunConfig(Section):
    """Everything that can be chosen for one run."""

    name: str = operational("")
    """Name of the run: letters, digits, dot, dash and underscore; empty makes one from the kind and the time."""
    kind: Literal["train", "sft", "evaluate", "replay"] = operational("train")
    """What the run does."""
    store: str = operational("stagecoach-store")
    """Root of the store: a directory, or a URL of an object store."""
    seed: int | None = None
    """Seed of the run; null draws one when the config is resolved, so that a new run samples anew."""
    steps: int = operational(20, ge=1)
    """Steps to make; a longer run continues a shorter one."""
    model: ModelConfig = ModelConfig()
    environments: tuple[EnvironmentConfig, ...] = ()
    assignment: AssignmentConfig = AssignmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    filtering: FilteringConfig = FilteringConfig()
    advantage: AdvantageConfig = Field(default_factory=GrpoConfig)
    packing: PackingConfig = PackingConfig()
    gate: GateConfig = NoGate()
    training: TrainingConfig = TrainingConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    data: SupervisedDataConfig = SupervisedDataConfig()
    replay: ReplayConfig = operational(ReplayConfig())
    """What a replay goes through again; the keys follow from what it finds there."""
    prefect: PrefectConfig = PrefectConfig()
    wandb: WandbConfig = WandbConfig()

    @field_validator("name")
    @classmethod
    def _slug(cls, name: str) -> str:
        if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"{name!r}: use letters, digits, dot, dash and underscore, starting with a letter or digit"
            )
        return name


class View:
    """The sections that a stage declares, and no others: reading another is an error, so that keys stay honest."""

    def __init__(self, config: RunConfig, sections: tuple[str, ...], stage: str) -> None:
        self._stage = stage
        self._sections = {name: getattr(config, name) for name in sections}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._sections[name]
        except KeyError:
            raise AttributeError(
                f"stage {self._stage!r} reads config section {name!r}, which it does not declare: "
                "its key would not change"
            ) from None

    def content(self) -> dict[str, Any]:
        """What goes into the key: the declared sections without operational fields, as plain JSON values."""
        return {
            name: content(value)
            for name, value in self._sections.items()
            if not is_operational(RunConfig.model_fields[name])
        }


def is_operational(field: FieldInfo) -> bool:
    """Tell whether a field is marked as one that cannot change rows."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("operational"))


def content(value: Any) -> Any:
    """Return `value` as plain JSON values, leaving out operational fields at every depth."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {name: content(getattr(value, name)) for name, field in fields.items() if not is_operational(field)}
    if isinstance(value, Mapping):
        return {str(name): content(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [content(item) for item in value]
    return value
