"""Requests of environment servers to models: where and how they call an engine or a chat API, and how that samples.

RolloutRunner makes them; they travel with each request for a rollout.
"""

from typing import TYPE_CHECKING, Any

from tasks.inference.engine import model_info
from tasks.inference.engine.client import Engine, authorization

if TYPE_CHECKING:
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.types import SamplingConfig

    from configs.evaluation import ExternalModelConfig
    from configs.run import View

CHAT_API_SEEDS = 2**30
"""Seeds for chat APIs stay below: they take 31 bits, fewer than ours have, and the seats of an episode add to them."""


def api_address(engine_url: str) -> str:
    """Return where an engine answers calls of environment servers."""
    return f"{engine_url.rstrip('/')}/v1"


def client_config(engine_url: str, api_key: str, config: "View") -> "TrainClientConfig":
    """Return where and how an environment server calls the engine: tokens in, tokens out, with the run's renderer.

    The API key travels with the request: a server that someone else runs then needs no configuration, and a program
    that a model drives does not find the key among its environment variables. Rows are stored without it
    (`rows.wire_record`).
    """
    from verifiers.v1.configs.client import TrainClientConfig

    tokenizer = config.model.tokenizer or config.model.path or Engine(engine_url, api_key).model_directory()
    return TrainClientConfig(
        base_url=api_address(engine_url),
        api_key_var=config.engine.api_key_variable,
        headers=authorization(api_key),
        renderer=model_info.renderer_config(config.model.renderer, tokenizer, config.model.renderer_settings),
        renderer_model_name=tokenizer,
    )


def chat_client_config(external: "ExternalModelConfig") -> "EvalClientConfig":
    """Return where and how an environment server calls an external chat API: messages in, messages out.

    The key is read by the environment server, from the variable that the config names: it travels with no request.
    """
    from verifiers.v1.configs.client import EvalClientConfig

    return EvalClientConfig(base_url=external.url, api_key_var=external.api_key_variable)


def chat_sampling_config(
    external: "ExternalModelConfig", config: "View", temperature: float, seed: int | None
) -> "SamplingConfig":
    """Return how a chat API is asked to sample; `external.settings` override the run's.

    `seed` is that of the attempt, of which `agent_runs.call_seed` makes those of its calls; None sends none.
    """
    small_seed = None if seed is None else seed % CHAT_API_SEEDS
    return _sampling_config(config, temperature, small_seed, **external.settings)


def sampling_config(config: "View", temperature: float, seed: int | None, salt: str) -> "SamplingConfig":
    """Return how the tokens of one rollout are sampled.

    `seed` is that of the attempt, of which `agent_runs.call_seed` makes those of its calls; None sends none. The cache
    is salted: states computed with other weights are never reused.
    """
    # The environment server reads the tokens itself.
    return _sampling_config(config, temperature, seed, cache_salt=salt, detokenize=False)


def _sampling_config(config: "View", temperature: float, seed: int | None, **others: Any) -> "SamplingConfig":
    from verifiers.v1.types import SamplingConfig

    limits = {"top_p": config.rollout.top_p, "max_tokens": config.rollout.max_tokens}
    return SamplingConfig.model_validate({"temperature": temperature, "seed": seed, **limits, **others})
