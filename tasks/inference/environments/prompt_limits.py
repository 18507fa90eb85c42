"""First prompts before anything is sampled: examples with too long ones are left out, and they can be read as text."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tasks.arrays.columns import texts
from tasks.inference.engine.model_info import model_directory, renderer_name
from tasks.inference.environments.packages import EnvironmentUnavailable
from tasks.inference.environments.servers import LoadedEnvironment
from tasks.inference.trace_rows.demonstrations import load_renderer

if TYPE_CHECKING:
    from configs.environments import EnvironmentConfig
    from configs.sections import ModelConfig


def limit_prompts(
    environment: "EnvironmentConfig", loaded: LoadedEnvironment, model: "ModelConfig"
) -> LoadedEnvironment:
    """Return a loaded environment without the examples whose first prompt is longer than `max_prompt_tokens`.

    Raises EnvironmentUnavailable where `long_prompts` is "error" and there are any, where none is left, and where no
    model is named whose tokenizer could count.
    """
    limit = environment.max_prompt_tokens
    if limit is None:
        return loaded
    about = f"environment {environment.name!r}: max_prompt_tokens is {limit}"
    place = model.tokenizer or model.path
    if not place:
        raise EnvironmentUnavailable(f"{about}, and no model is named whose tokenizer counts. Set model.path")
    renderer = _renderer(model, str(model_directory(place)))
    lengths = [len(_prompt_ids(json.loads(task), renderer)) for task in texts(loaded.examples["task"])]
    fits = [length <= limit for length in lengths]
    long = tuple(length for length in lengths if length > limit)
    remedy = 'set long_prompts = "drop"' if any(fits) else "take other examples"
    if long and (environment.long_prompts == "error" or not any(fits)):
        raise EnvironmentUnavailable(
            f"{about}, and {len(long)} of {len(lengths)} examples have a longer first prompt, of up to {max(long)} "
            f"tokens. Nothing was sampled. Raise the limit, shorten the prompts, or {remedy}"
        )
    return replace(loaded, examples=loaded.examples.filter(pa.array(fits, pa.bool_())), long_prompts=long)


def prompt_texts(tasks: Iterable[dict[str, Any]], model: "ModelConfig", directory: str) -> Iterator[tuple[int, str]]:
    """Yield for each task the number of tokens of its first prompt, and the text that the model will see.

    `directory` has the model's tokenizer.
    """
    from renderers.base import load_tokenizer

    renderer, tokenizer = _renderer(model, directory), load_tokenizer(directory)
    for task in tasks:
        tokens = _prompt_ids(task, renderer)
        yield len(tokens), tokenizer.decode(tokens)


def _renderer(model: "ModelConfig", directory: str) -> Any:
    return load_renderer(directory, renderer_name(model.renderer, model.path), model.renderer_settings)


def _prompt_ids(task: dict[str, Any], renderer: Any) -> list[int]:
    """Return the tokens of the prompt that a task begins with; none where it is missing or not text alone."""
    prompt, system = task.get("prompt") or [], task.get("system_prompt")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not messages or not all(isinstance(message.get("content"), str) for message in messages):
        return []
    messages = [{"role": "system", "content": system}, *messages] if system else messages
    return list(renderer.render_ids(messages, add_generation_prompt=True))
