"""Requests of environment servers to models: where and how they call an engine or a chat API, and how that samples.

RolloutRunner makes them; they travel with each request for a rollout.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from configs.algorithms import ChatTeacherConfig
from tasks.inference.engine import model_info
from tasks.inference.engine.client import Engine, ServedModel, authorization
from tasks.inference.environments.agent_runs import CHAT_HEADER

if TYPE_CHECKING:
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.types import SamplingConfig

    from configs.run import View

CHAT_API_SEEDS = 2**30
"""Seeds for chat APIs stay below: they take 31 bits, fewer than ours have, and the seats of an episode add to them."""


def api_address(engine_url: str) -> str:
    """Return where an engine answers calls of environment servers."""
    return f"{engine_url.rstrip('/')}/v1"


def client_config(served: ServedModel, config: "View", default_key: str = "") -> "TrainClientConfig | EvalClientConfig":
    """Return where and how an environment server calls a model.

    That is an engine, tokens in and tokens out with the run's renderer, or a chat API, messages in and messages out.
    The API key of an engine (`default_key` for one without) travels with the request: a server that someone else runs
    then needs no configuration, and a program that a model drives does not find the key among its environment
    variables. Rows are stored without it (`rows.wire_record`). So does the key of a teacher's chat API. That of an
    evaluated one is read by the environment server, from the variable that the config names.
    """
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig

    chat, url, timeout = served.chat, api_address(served.url), dict[str, Any]()
    headers = authorization(served.api_key or default_key)
    if isinstance(chat, ChatTeacherConfig):
        num_processes = sum(each.num_processes(config.rollout.max_in_flight) for each in config.environments)
        seconds = 60 * num_processes / chat.requests_per_minute if chat.requests_per_minute else 0
        headers[CHAT_HEADER] = json.dumps({"retries": chat.retries, "seconds_between": seconds})
        url, timeout = chat.url, {"read": chat.answer_seconds}
    elif chat:
        return EvalClientConfig(base_url=chat.url, api_key_var=chat.api_key_variable)
    model = config.model
    tokenizer = model.tokenizer or model.path or Engine(served.url, served.api_key).model_directory()
    return TrainClientConfig(
        base_url=url,
        api_key_var=config.engine.api_key_variable,
        headers=headers,
        timeout=timeout,
        renderer=model_info.renderer_config(model.renderer, tokenizer, model.renderer_settings),
        renderer_model_name=tokenizer,
    )


def sampling_of(config: "View", environment: str) -> dict[str, Any]:
    """Return the fields of a request that say how an environment is sampled: its own before those of the rollout."""
    own = next(each for each in config.environments if each.name == environment)
    return {**config.rollout.request_sampling, **own.request_sampling}


def sampling_config(served: ServedModel, sampling: Mapping[str, Any], seed: int | None) -> "SamplingConfig":
    """Return how a model samples one rollout, with the fields of `sampling_of`; settings of a chat API override them.

    `seed` is that of the attempt, of which `agent_runs.call_seed` makes those of its calls; None sends none. The cache
    of an engine is salted: states computed with other weights are never reused.
    """
    from verifiers.v1.types import SamplingConfig

    # Of an engine the environment server reads the tokens itself; the engine looks for texts that end a reply.
    of_engine = {"cache_salt": served.salt, "detokenize": bool(sampling.get("stop"))}
    settings = served.chat.settings if served.chat else of_engine
    if served.chat and seed is not None:
        seed %= CHAT_API_SEEDS
    return SamplingConfig.model_validate({**sampling, "seed": seed, **settings})
