"""Requests: what an environment server is told of the engine that a rollout is to be sampled by."""

from typing import TYPE_CHECKING

from tasks.inference import model_info
from tasks.inference.engine import Engine

SEEDS = 2**30
"""Chat APIs take smaller seeds than ours are: of 31 bits, and the seats of an episode add to theirs."""

if TYPE_CHECKING:
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.types import SamplingConfig

    from configs.evaluation import ExternalModelConfig
    from configs.run import View


def client_config(engine_url: str, api_key: str, config: "View") -> "TrainClientConfig":
    """Return where and how an environment server calls the engine: tokens in, tokens out, with the run's renderer.

    The key travels with the request, so that a server that someone else runs needs nothing of ours and no program
    that a model drives finds it in its environment. It is taken out of the rows (`rows.wire_record`).
    """
    from verifiers.v1.configs.client import TrainClientConfig

    tokenizer = config.model.tokenizer or config.model.path or Engine(engine_url, api_key).model_directory()
    return TrainClientConfig(
        base_url=f"{engine_url.rstrip('/')}/v1",
        api_key_var=config.engine.api_key_variable,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        renderer=model_info.renderer_config(config.model.renderer, tokenizer, config.model.renderer_settings),
        renderer_model_name=tokenizer,
    )


def chat_client_config(external: "ExternalModelConfig") -> "EvalClientConfig":
    """Return where and how an environment server calls a chat API of someone else: messages in, messages out.

    The key is read where the server runs, from the variable that is named: it travels with no request.
    """
    from verifiers.v1.configs.client import EvalClientConfig

    return EvalClientConfig(base_url=external.url, api_key_var=external.api_key_variable)


def chat_sampling_config(
    external: "ExternalModelConfig", config: "View", temperature: float, seed: int
) -> "SamplingConfig":
    """Return how a chat API is asked to sample; `external.settings` go before what the run says."""
    from verifiers.v1.types import SamplingConfig

    ours = {"temperature": temperature, "top_p": config.rollout.top_p, "max_tokens": config.rollout.max_tokens}
    return SamplingConfig.model_validate({**ours, "seed": seed % SEEDS, **external.settings})


def sampling_config(config: "View", temperature: float, seed: int, salt: str) -> "SamplingConfig":
    """Return how the tokens of one rollout are sampled.

    The cache is salted: states computed with other weights are never reused.
    """
    from verifiers.v1.types import SamplingConfig

    return SamplingConfig.model_validate(
        {
            "temperature": temperature,
            "top_p": config.rollout.top_p,
            "max_tokens": config.rollout.max_tokens,
            "seed": seed,
            "cache_salt": salt,
            "detokenize": False,  # the environment server reads the tokens itself
        }
    )
