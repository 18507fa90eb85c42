"""The sets of an evaluation as places to work at: each has a config of its own, so that keys know no other set."""

from typing import Any

from configs.algorithms import GrpoConfig
from configs.evaluation import EvaluationConfig
from configs.run import RunConfig
from configs.sections import ModelConfig
from configs.services import EngineConfig
from tasks.runtime.run_context import RunContext


def evaluation_contexts(place: RunContext) -> dict[str, RunContext]:
    """Return where each set of a run is evaluated, by its name; "" is the one without a name."""
    return {name: _with(place, each) for name, each in evaluation_configs(place.config).items()}


def evaluation_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Return what a run's config comes to in the evaluation of each set, by its name; "" is the one without a name."""
    return {name: _evaluating(config, each) for name, each in config.evaluation.of_sets().items()}


def _with(place: RunContext, config: RunConfig) -> RunContext:
    return RunContext(place.store, place.run, config, place.versions)


def _evaluating(config: RunConfig, evaluation: EvaluationConfig) -> RunConfig:
    """Return a config with the sampling settings of an evaluation; no teacher samples there.

    Every group is sampled to its end: scores of those that end first would be of the short ones.
    """
    own = {"temperature": None, "algorithm": None}
    environments = tuple(each.model_copy(update=own) for each in config.environments)
    rollout = config.rollout.model_copy(update={"temperature": evaluation.temperature})
    changed: dict[str, Any] = {"rollout": rollout, "environments": environments, "algorithm": GrpoConfig()}
    changed |= {"assignment": config.assignment.model_copy(update={"oversampling": 1.0})}
    changed |= {"evaluation": evaluation} | _without_engine(config)
    return config.model_copy(update=changed)


def _without_engine(config: RunConfig) -> dict[str, Any]:
    """Return what an evaluation of someone else's model leaves open: it asks no engine and no weights of ours."""
    return {"engine": EngineConfig(), "model": ModelConfig()} if config.external else {}
