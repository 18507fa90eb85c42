"""The config of a whole run, and the view of it that one stage may see."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, field_validator

from configs.alerts import AlertConfig
from configs.algorithms import (
    AlgorithmConfig,
    GroupSection,
    GrpoConfig,
    PreferencesConfig,
    SftConfig,
    SupervisedConfig,
    TeacherConfig,
)
from configs.environments import EnvironmentConfig, PlayerConfig, SeatRule
from configs.evaluation import EvaluationConfig
from configs.fields import Section, in_key, is_elsewhere, operational
from configs.filters import FilteringConfig, filter_name
from configs.judges import JudgeConfig, judges_inside
from configs.replay import GateConfig, NoGate, ReplayConfig, StageName, replayed_stages
from configs.sections import (
    AdmissionConfig,
    AssignmentConfig,
    ModelConfig,
    PackingConfig,
    RolloutConfig,
    SupervisedDataConfig,
)
from configs.services import (
    EngineConfig,
    ExternalModelConfig,
    LearnerConfig,
    NoTracking,
    PlacementConfig,
    PrefectConfig,
    TrackingConfig,
)
from configs.store import default_store
from configs.training import TrainingConfig

Setting = TypeVar("Setting")


class RunConfig(Section):
    """Everything that can be chosen for one run."""

    name: str = operational("")
    """Name of the run: letters, digits, dot, dash and underscore; empty makes one from the kind and the time."""
    kind: Literal["train", "sft", "dpo", "evaluate", "replay"] = operational("train")
    """What the run does."""
    store: str = Field(default_factory=default_store, json_schema_extra={"operational": True})
    """Root of the store: a directory, or a URL of an object store; by default what STAGECOACH_STORE names."""
    seed: int | None = None
    """Seed of the run; null draws one when the config is resolved, so that a new run samples anew."""
    steps: int = operational(20, ge=1)
    """Steps to make; a longer run continues a shorter one."""
    fork: str = operational("")
    """RUN:STEP, the recorded run and step that this run goes on from: with the policy and optimizer state, the config
    and the seed that the step began with, and what this run sets otherwise. Empty starts from `model.path`."""
    model: ModelConfig = ModelConfig()
    environments: tuple[EnvironmentConfig, ...] = ()
    judges: tuple[JudgeConfig, ...] = ()
    """Models that score rollouts after they are sampled (`judging`); without one there is no such stage."""
    assignment: AssignmentConfig = AssignmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    filtering: FilteringConfig = FilteringConfig()
    algorithm: AlgorithmConfig = Field(default_factory=GrpoConfig)
    """How rollouts are credited, where their environment does not say otherwise."""
    admission: AdmissionConfig | None = None
    """Which groups are refused for what their tokens' advantages are; null admits all."""
    packing: PackingConfig = PackingConfig()
    gate: GateConfig = NoGate()
    training: TrainingConfig = TrainingConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    data: SupervisedDataConfig = SupervisedDataConfig()
    replay: ReplayConfig = operational(ReplayConfig())
    """What a replay computes again; the keys follow from the recorded work."""
    placement: PlacementConfig = operational(PlacementConfig())
    prefect: PrefectConfig = PrefectConfig()
    tracking: TrackingConfig = NoTracking()
    alerts: tuple[AlertConfig, ...] = operational(())
    """Who gets a message when something happens to the run."""

    @property
    def from_data(self) -> bool:
        """Whether the run trains on what there is, demonstrations or preferences, and in no environment."""
        return self.kind in ("sft", "dpo")

    @property
    def pairs(self) -> bool:
        """Whether rollouts of a group are compared in the loss, so that an update has all of them."""
        return any(isinstance(each, PreferencesConfig) for each in self.used_algorithms.values())

    @property
    def served_environments(self) -> dict[str, EnvironmentConfig]:
        """The environments that the run makes rollouts in, by their keys: first those that it trains in."""
        trained = {f"environments.{index}": entry for index, entry in enumerate(self.environments)}
        tables = self.evaluation.tables.items() if self.kind != "replay" else ()
        own = {key: table.environment for key, table in tables if table.taskset}
        names, sets = {entry.name for entry in own.values()}, self.evaluation.of_sets().values()
        only_own = self.kind == "evaluate" and all(names.issuperset(entry.environments or ("",)) for entry in sets)
        return own if only_own or self.from_data else trained | own

    @property
    def beside_policy(self) -> dict[str, PlayerConfig]:
        """The players that the policy's engine serves beside it, by their names there."""
        players = [player for each in self.served_environments.values() for player in each.players.values()]
        return {player.beside: player for player in players if player.beside}

    @property
    def algorithms(self) -> dict[str, AlgorithmConfig]:
        """The algorithms of environments that have one of their own, by the environment's name."""
        return {each.name: each.algorithm for each in self.environments if each.algorithm is not None}

    @property
    def used_algorithms(self) -> dict[str, AlgorithmConfig]:
        """The algorithms that credit rollouts of the run, by where the config names them."""
        own = {f"environments.{i}.algorithm": each.algorithm for i, each in enumerate(self.environments)}
        used = {where: algorithm for where, algorithm in own.items() if algorithm is not None}
        # Demonstrations belong to no environment: the run's own algorithm credits them, whatever environments have.
        if not self.from_data and used and len(used) == len(own):
            return used
        return {"algorithm": self.algorithm, **used}

    @property
    def learns_from_equals(self) -> dict[str, bool | None]:
        """Whether an environment's algorithm learns from a group of equal rewards."""
        return self._by_environment(_learns_from_equals)

    @property
    def filter_names(self) -> tuple[str, ...]:
        """The filters that the run asks, by the names that verdicts have for them."""
        return tuple(filter_name(each) for each in self.filtering.filters)

    @property
    def wanted_groups(self) -> int | None:
        """The groups that a step is to train on, where fewer may be left; None where every step has the same."""
        return self.assignment.groups_per_step if self.assignment.refill or self.admission else None

    @property
    def episode_agents(self) -> dict[str, tuple[str, ...] | None]:
        """The agents of an environment that are compared within an episode, in place of the group."""
        return self._by_environment(lambda algorithm: getattr(algorithm, "episode_agents", None))

    @property
    def constant_lengths(self) -> dict[str, int | None]:
        """Tokens that a rollout of an environment counts for in the rl denominator, where that is constant."""
        return self._by_environment(lambda algorithm: getattr(algorithm, "length_normaliser", None))

    @property
    def teachers(self) -> dict[str, TeacherConfig | None]:
        """Who samples an environment's rollouts in place of the policy."""
        return self._by_environment(lambda algorithm: algorithm.teacher if isinstance(algorithm, SftConfig) else None)

    @property
    def keeps_turns(self) -> bool:
        """Whether turns of rollouts under way are committed: also replies of a chat API, which are paid for."""
        return self.rollout.keep_turns or any(teacher and teacher.chat for teacher in self.teachers.values())

    @property
    def scorers(self) -> dict[str, AlgorithmConfig | None]:
        """The algorithms whose tokens are scored before the advantage stage."""
        return self._by_environment(lambda algorithm: algorithm if algorithm.scored_by else None)

    @property
    def seat_rules(self) -> dict[str, SeatRule]:
        """Which seats of an environment are trained, where that is not all but the judge's."""
        # Only what differs: a rule that every environment has would be in all keys and say nothing.
        return {each.name: each.seat_rule for each in self.environments if each.seat_rule != SeatRule()}

    @property
    def drawn_by_learners(self) -> dict[str, SeatRule]:
        """Environments of which only the learner's reward says how hard an example was, where the sampler asks that."""
        rule = SeatRule(learner_seat=True)
        own = self.assignment.sampler.stateful
        return {each.name: rule for each in self.environments if own and each.learner_seat}

    @property
    def environment_judges(self) -> dict[str, dict[str, Any]]:
        """What judges of the run, by name, answer the code of environments with."""
        asked = {name for environment in self.environments for name in judges_inside(environment)}
        return {
            each.name: {"model": each.identity, "sampling": each.sampling} for each in self.judges if each.name in asked
        }

    @property
    def records_experts(self) -> bool:
        """Whether rollouts record the experts that the engine chose."""
        return self.training.router_replay == "rollout"

    @property
    def prompt_limits(self) -> dict[str, Any]:
        """The settings that prompts are counted with, where an environment limits their tokens."""
        limited = any(each.max_prompt_tokens for each in self.environments)
        counted_with = ("renderer", "renderer_settings", "tokenizer_digest")
        return {name: getattr(self.model, name) for name in counted_with} if limited else {}

    @property
    def oversampling(self) -> float | None:
        """How many times the groups that a step needs are begun; None where no more are."""
        return self.assignment.oversampling if self.assignment.oversampling > 1 else None

    @property
    def streams(self) -> bool:
        """Whether steps take their rollouts from one stream, which is sampled ahead of the training."""
        return self.kind == "train" and self.rollout.max_off_policy_steps > 1

    @property
    def shares_gpu(self) -> bool:
        """Whether engine and learner have a GPU in common, if they have any."""
        both = self.kind == "train" or (self.from_data and self.evaluation.evaluates_training)
        if not both or self.engine.url or self.placement.services == "pools":
            return False
        engine, learner = ({*text.split(",")} - {""} for text in (self.engine.gpus, self.learner.gpus))
        return not engine or not learner or bool(engine & learner)

    @property
    def external(self) -> ExternalModelConfig | None:
        """The model that an evaluation tries in place of a policy; None where it tries one."""
        return self.evaluation.external if self.kind == "evaluate" else None

    @property
    def stateful(self) -> bool:
        """Whether an algorithm carries state from step to step."""
        return any(each.stateful for each in (self.algorithm, *self.algorithms.values()))

    def computes(self, *stages: StageName) -> bool:
        """Tell whether rows of all these stages are made: by a training run of each, by a replay where it asks so."""
        return self.kind == "train" or (self.kind == "replay" and {*stages} <= {*replayed_stages(self.replay)})

    def algorithm_of(self, environment: str) -> AlgorithmConfig:
        """Return the algorithm that credits an environment's rollouts: its own, or else the run's."""
        return self.algorithms.get(environment, self.algorithm)

    def _by_environment(self, pick: Callable[[AlgorithmConfig], Any]) -> dict[str, Any]:
        """Return a setting of the algorithms by environment, the run's under ""; nothing where no algorithm has it."""
        found = {"": pick(self.algorithm)} | {name: pick(each) for name, each in self.algorithms.items()}
        return found if any(found.values()) else {}

    @field_validator("name")
    @classmethod
    def _slug(cls, name: str) -> str:
        # It is part of paths, in the store and of logs, and of what is typed: RUN:VERSION.
        if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"{name!r}: use letters, digits, dot, dash and underscore, starting with a letter or digit"
            )
        return name


def _learns_from_equals(algorithm: AlgorithmConfig) -> bool:
    """Tell whether equal rewards teach: without a comparison, or where lengths are compared with them.

    False for `supervised`: True would change the keys of its rollouts, which were filtered before there was this field.
    """
    if isinstance(algorithm, GroupSection):
        return algorithm.shaped
    return not (algorithm.compares_group or isinstance(algorithm, SupervisedConfig))


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
        fields = RunConfig.model_fields
        # What is empty is left out, so that a feature that is off leaves no trace in keys.
        collected = {name: content(value) for name, value in self._sections.items() if name not in fields and value}
        own = {name: value for name, value in self._sections.items() if name in fields}
        return {name: content(value) for name, value in own.items() if in_key(fields[name], value)} | collected


def content(value: Any, *, in_place: bool = False) -> Any:
    """Return `value` as plain JSON values, leaving out at every depth what does not belong to a key.

    `in_place` keeps fields that keys have under another section, where they are set: to show a whole config.
    """
    if isinstance(value, BaseModel):
        return {
            name: content(item, in_place=in_place)
            for name, field in type(value).model_fields.items()
            if in_key(field, item := getattr(value, name)) or (in_place and is_elsewhere(field) and item is not None)
        }
    if isinstance(value, Mapping):
        return {str(name): content(item, in_place=in_place) for name, item in value.items()}
    if isinstance(value, (list, tuple)):  # JSON knows lists alone
        return [content(item, in_place=in_place) for item in value]
    return value


def for_environment(by_environment: Mapping[str, Setting | None], environment: str) -> Setting | None:
    """Return the setting of an environment: its own, or else the run's, which is under the empty name."""
    return by_environment[environment] if environment in by_environment else by_environment.get("")


def needs_reference_scores(config: RunConfig) -> bool:
    """Tell whether a run has rollouts scored by a reference: of a replay, whether it does so again."""
    return (config.kind == "dpo" or config.computes("advantage")) and bool(config.scorers)


def policy_scores(config: RunConfig) -> bool:
    """Tell whether the policy that sampled rollouts scores some of them itself."""
    return any(each is not None and each.scored_by == "policy" for each in config.scorers.values())


def only_teachers_sample(config: RunConfig) -> bool:
    """Tell whether no environment's rollouts are sampled by the policy, so that they do not depend on it."""
    return bool(config.teachers) and all(
        for_environment(config.teachers, each.name) is not None for each in config.environments
    )
