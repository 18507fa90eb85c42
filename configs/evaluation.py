"""Evaluation: which held-out examples a policy, or a model that someone else serves, is tried on, how often, and when.

The fields of `EvaluationConfig` itself are one set of examples. Where `sets` are named, those take its place, and each
takes from it what it leaves open. An environment that is only evaluated on is a set of its own, too.
"""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from configs.environments import EnvironmentConfig
from configs.fields import elsewhere, operational
from configs.sampling import SamplingConfig
from configs.services import ExternalModelConfig

Wanted = tuple[str | int | float | bool | None, ...]
"""The values of a field that an example is chosen by."""
ROUNDING = 1e-9
"""A reward this much short of a threshold reaches it: weights of .7, .2 and .1 add up to 0.9999999999999999."""


def passes(reward: Any, threshold: Any) -> Any:
    """Tell whether a reward is one of success: at least the threshold, but for what rounding takes off a weighted sum.

    This is the one place that says so, of numbers, of arrays and of expressions over columns alike. What is not a
    number does not pass; a null of a column stays one.
    """
    return reward >= threshold - ROUNDING * (1 + abs(threshold))


class SetSettings(SamplingConfig):
    """What a set of examples has of its own; null takes the value of `evaluation`."""

    name: str = operational(..., min_length=1)
    """The set's name in tables and notes. Not in keys: sets of the same settings are the same work, in any run."""
    where: dict[str, Wanted] | None = None
    """Which examples are tried: by field of the example's task (nested ones with dots), the values that it may have,
    as in `where = { tier = [3, 4] }`. A field that an example lacks is an error."""
    num_examples: int | None = Field(None, ge=1)
    """Examples tried of each environment."""
    attempts: int | None = Field(None, ge=1)
    """Rollouts of each example."""
    pass_at: tuple[int, ...] | None = operational(None)
    """The k of pass@k; none above attempts."""
    pass_reward: float | None = operational(None)
    """The reward from which on an attempt passes."""
    every: int | None = operational(None, ge=0)
    """Evaluate every n steps during training; 0 is only when asked."""
    at_start: bool | None = operational(None)
    """Whether a training run evaluates the policy that it starts from."""


class EvaluationSet(SetSettings):
    """A set of held-out examples with its own interval."""

    environments: tuple[str, ...] | None = None
    """Names of the environments that are tried; empty tries all that the run trains in."""


class EvaluationEnvironment(EnvironmentConfig, SetSettings):
    """An environment that is never trained on, and the set of its examples; all of them are for evaluation.

    Without a taskset it is the environment of that name which the run trains in, with a set of its own.
    """

    taskset: dict[str, Any] = Field({})
    """The verifiers taskset: its `id` (an installed package) and its own settings. Empty: that of the environment of
    this name that the run trains in."""
    holdout_fraction: float = Field(1.0, ge=1, le=1)
    """All examples are for evaluation; `num_examples` bounds how many are tried."""

    @property
    def environment(self) -> EnvironmentConfig:
        """The environment alone, as the stages see it: how it is evaluated is in no key of its examples."""
        return EnvironmentConfig.model_construct(
            **{name: getattr(self, name) for name in EnvironmentConfig.model_fields}
        )


def _kind(value: Any) -> str:
    return "str" if isinstance(value, str) else "EvaluationEnvironment"


NamedOrOwn = Annotated[
    Annotated[str, Tag("str")] | Annotated[EvaluationEnvironment, Tag("EvaluationEnvironment")], Discriminator(_kind)
]
"""The name of an environment that the run trains in, or the table of one for evaluation."""


class EvaluationConfig(SamplingConfig):
    num_examples: int = Field(64, ge=1)
    """Held-out examples tried of each environment, the first in hash order; of one that is never trained on at most so
    many."""
    attempts: int = Field(1, ge=1)
    """Rollouts of each example, k of avg@k."""
    pass_at: tuple[int, ...] = operational((1,))
    """The k of pass@k by the unbiased estimator; none above attempts."""
    pass_reward: float = operational(1.0)
    """The lowest reward with which an attempt passes, in pass@k and in the viewer; rounding errors do not count. The
    length penalty of an algorithm has its own threshold, `passing`."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature in evaluation; of other settings null takes those of training."""
    policy: str = operational("")
    """The policy to evaluate: RUN for a run's last one, RUN:VERSION for an earlier one; empty takes model.path."""
    every: int = operational(0, ge=0)
    """Evaluate every n steps during training; 0 evaluates only when asked. Supervised runs evaluate only in
    `environments` of their own."""
    at_start: bool = operational(True)
    """Whether a training run with evaluations also evaluates the policy that it starts from."""
    overlap: bool = operational(True)
    """Whether a training run goes on with the next step while a policy is evaluated."""
    retry_errors: int = operational(0, ge=0)
    """How many times rollouts that ended with an error are sampled again, with another seed; the first ones are
    kept."""
    environments: tuple[NamedOrOwn, ...] = ()
    """Names of the environments that are tried; empty tries all that the run trains in. A table is an environment that
    is only evaluated on, a set of its own; with tables alone nothing else is tried."""
    where: dict[str, Wanted] = Field({})
    """Which examples are tried: by field of the example's task (nested ones with dots), the values that it may have."""
    sets: tuple[EvaluationSet, ...] = ()
    """Sets of examples, in place of the one set that the other fields describe."""
    external: ExternalModelConfig | None = elsewhere(None)
    """A model that someone else serves, evaluated in place of a policy; for runs of kind `evaluate`."""

    def of_sets(self) -> "dict[str, EvaluationConfig]":
        """Return each set as an evaluation of its own, by name; "" is the one without a name.

        The keys of an evaluation are made of that and of nothing in other sets.
        """
        names = tuple(entry for entry in self.environments if isinstance(entry, str))
        alone = self.model_copy(update={"sets": (), "environments": names})
        sets = {"": alone} if "evaluation" in self.set_keys else {}
        fields = {"environments", *SetSettings.model_fields} - {"name"}
        for entry in (*self.sets, *self.tables.values()):
            # What a set leaves open is null, and stays as the evaluation itself has it.
            settings = entry.model_dump(include=fields, exclude_none=True)
            only = {"environments": (entry.name,)} if isinstance(entry, EvaluationEnvironment) else {}
            sets[entry.name] = alone.model_copy(update=only | settings)
        return sets

    @property
    def tables(self) -> dict[str, EvaluationEnvironment]:
        """The tables among the environments, by their keys."""
        return {
            f"evaluation.environments.{index}": entry
            for index, entry in enumerate(self.environments)
            if isinstance(entry, EvaluationEnvironment)
        }

    @property
    def set_keys(self) -> list[str]:
        """The keys of the sections that the sets come from, in the order of `of_sets`."""
        tables = [*self.tables]
        # With tables alone there is no set of the environments that the run trains in.
        alone = [] if tables and len(tables) == len(self.environments) else ["evaluation"]
        return [*([f"evaluation.sets.{index}" for index in range(len(self.sets))] or alone), *tables]

    @property
    def evaluates_training(self) -> bool:
        """Whether a training run evaluates any set."""
        return any(each.every for each in self.of_sets().values())

    def due(self, version: int) -> bool:
        """Tell whether a training run evaluates this set on the policy that `version` steps made."""
        if not self.every:
            return False
        return version % self.every == 0 if version else self.at_start
