"""What must hold of how replies are sampled, and which settings the log-probs of the learner know nothing of."""

from collections.abc import Container, Iterator, Mapping
from typing import Any

from configs.errors import did_you_mean
from configs.run import RunConfig
from configs.sampling import NEUTRAL, SamplingConfig

ENGINE_ALONE = ("top_k", "min_p", "repetition_penalty")
"""Settings that the chat API of OpenAI does not have."""
FURTHER = {*NEUTRAL, "ignore_eos"}.difference(SamplingConfig.model_fields)
"""What `extra_body` may have for an engine, which would ignore any other name."""


def sampling_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each setting of sampling that engine or chat API cannot take."""
    longest, external = config.engine.max_model_len, config.external
    for where, section in _sections(config):
        for name in ENGINE_ALONE:
            if external and getattr(section, name) is not None:
                yield (
                    f"{where}.{name}: the chat API at {external.url} has no such field; where the model's server takes "
                    f"it, name it in evaluation.external.settings"
                )
        for name in () if external else (section.extra_body or {}).keys() - FURTHER:
            yield f"{where}.extra_body.{name}: engines have no such parameter{did_you_mean(name, FURTHER)}"
        # A model of others has an engine of its own, of which this config says nothing.
        if (section.max_tokens or 0) >= longest and not external:
            yield (
                f"{where}.max_tokens: {section.max_tokens} leaves no room for a prompt within engine.max_model_len "
                f"{longest}"
            )


def greedy_problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each temperature of zero that would be trained on."""
    for key, value in trained_sampling(config).items():
        if key.endswith(".temperature") and not value:
            yield (
                f"{key}: training needs a temperature above 0, as at 0 all rollouts of a group are the same; a seat "
                "at 0 needs trainable = false"
            )


def trained_sampling(config: RunConfig, environments: Container[int] | None = None) -> dict[str, Any]:
    """Return the settings that sample what is trained on, by the dotted key of where each is set.

    `environments` are the numbers of those that count; None is all. What all of them override is left out.
    """
    settings: dict[str, Any] = {}
    for index, environment in enumerate(config.environments):
        if environments is None or index in environments:
            own = _by_key(environment)
            settings |= {f"rollout.{key}": value for key, value in _by_key(config.rollout).items() if key not in own}
            settings |= {f"environments.{index}.{key}": value for key, value in own.items()}
            for name, seat in environment.seats.items():
                if seat.trainable and seat.model is None:
                    where = f"environments.{index}.seats.{name}"
                    settings |= {f"{where}.{key}": value for key, value in _by_key(seat).items()}
    return settings


def reshaping(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those that sample from another distribution than that of all tokens at the temperature."""
    names = {key: key.rpartition(".")[2] for key in settings}
    return {key: settings[key] for key, name in names.items() if settings[key] != NEUTRAL.get(name, settings[key])}


def _by_key(section: SamplingConfig) -> dict[str, Any]:
    settings = section.own_sampling
    extra = settings.pop("extra_body", {})
    return {**settings, **{f"extra_body.{name}": value for name, value in extra.items()}}


def _sections(config: RunConfig) -> Iterator[tuple[str, SamplingConfig]]:
    yield "rollout", config.rollout
    yield "evaluation", config.evaluation
    for index, entry in enumerate(config.evaluation.sets):
        yield f"evaluation.sets.{index}", entry
    yield from ((where, table) for where, table in config.evaluation.tables.items() if not table.taskset)
    for where, environment in config.served_environments.items():
        yield where, environment
        for name, seat in environment.seats.items():
            if seat.model is None:
                yield f"{where}.seats.{name}", seat
