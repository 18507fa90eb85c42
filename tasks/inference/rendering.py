"""Demonstrations as message rows: the tokens that the run's renderer makes of them, and what a policy would sample."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.inference import model_info
from tasks.inference.rows import Row

Message = Mapping[str, Any]


class DemonstrationUnusable(ValueError):
    """The renderer cannot turn a conversation into a training sample."""


def renderer(
    tokenizer_dir: str | Path, name: str, settings: Mapping[str, Any] | None = None
) -> Callable[..., list[Row]]:
    """Return a function from messages, and tools if there are any, to rows; see `demonstration`.

    `settings` are those of the renderer called `name`. The tokenizer and the renderer are loaded once.
    """
    from renderers import create_renderer
    from renderers.base import load_tokenizer

    config = model_info.renderer_config(name, str(tokenizer_dir), settings or {})
    made = create_renderer(load_tokenizer(str(tokenizer_dir)), config)
    # Without settings, as before renderers had any: prompts that open a thought by themselves are for the renderer.
    opening = _opening(made) if settings else []
    return lambda messages, tools=None: _rows(messages, made, opening, tools)


def demonstration(messages: Sequence[Message], tokenizer_dir: str | Path, name: str) -> list[Row]:
    """Return one row for each message, with the columns of the messages table except the trace's id.

    The rows' tokens joined together are what the renderer makes of the conversation, up to the end of the last
    assistant message; `mask` is true on what a policy would sample: the body of an assistant message and its end token.
    Raises DemonstrationUnusable where the conversation does not end with an assistant message.
    """
    return renderer(tokenizer_dir, name)(messages)


def _rows(
    messages: Sequence[Message], made: Any, opening: list[int], tools: Sequence[Message] | None = None
) -> list[Row]:
    if not messages or messages[-1]["role"] != "assistant":
        raise DemonstrationUnusable(
            f"a demonstration ends with an assistant message; this one has the roles "
            f"{[message['role'] for message in messages]}"
        )
    rendered = made.render([dict(message) for message in messages], tools=tools)
    tokens = list(rendered.token_ids)
    mask = _without(opening, tokens, _mask(messages, made, rendered, tools))
    if not any(mask):
        raise DemonstrationUnusable("the renderer marks no token of this demonstration as the assistant's")
    end = max(index for index, sampled in enumerate(mask) if sampled) + 1
    stops = made.get_stop_token_ids()
    if tokens[end - 1] not in stops:  # some templates leave the last turn open; a policy must learn to end it
        tokens[end:], mask[end:] = [stops[0]], [True]
        end += 1
    content = rendered.is_content[:end] if rendered.is_content else []
    content += [True] * (end - len(content)) if content else []
    starts = _starts(rendered, len(messages), end)
    return [
        _row(number, message, slice(*span), tokens, mask, content)
        for number, (message, span) in enumerate(zip(messages, starts, strict=True))
    ]


def _mask(messages: Sequence[Message], made: Any, rendered: Any, tools: Sequence[Message] | None) -> list[bool]:
    """Per token: whether the policy would sample it, as the renderer says, or as its generation prompts tell."""
    if rendered.sampled_mask:
        return list(rendered.sampled_mask)
    # A renderer around an opaque template does not say. What follows the prompt for a turn is that turn's.
    mask = [False] * len(rendered.token_ids)
    stops = set(made.get_stop_token_ids())
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = [dict(one) for one in messages[:number]]
        prompt = made.render(before, tools=tools, add_generation_prompt=True).token_ids
        if rendered.token_ids[: len(prompt)] != prompt:
            raise DemonstrationUnusable(
                f"message {number}: the template renders what comes before it differently once it is there, so its "
                "tokens cannot be told from the prompt's. Name a renderer of the model's family in model.renderer"
            )
        for index in range(len(prompt), len(mask)):
            mask[index] = True
            if rendered.token_ids[index] in stops:
                break
    return mask


def _opening(made: Any) -> list[int]:
    """What every prompt ends with, so that a policy goes on from there: the role, or an empty thought after it."""
    prompt = made.render([{"role": "user", "content": ""}], add_generation_prompt=True)
    return [token for token, index in zip(prompt.token_ids, prompt.message_indices, strict=True) if index < 0]


def _without(opening: list[int], tokens: list[int], mask: list[bool]) -> list[bool]:
    """The mask without `opening`, wherever it is in the tokens: a policy is given it."""
    for start in range(len(tokens) - len(opening) if opening else 0):
        if tokens[start : start + len(opening)] == opening:
            mask[start : start + len(opening)] = [False] * len(opening)
    return mask


def _starts(rendered: Any, num_messages: int, end: int) -> list[tuple[int, int]]:
    """Where each message's tokens begin and end; what lies between two messages belongs to the later one."""
    spans, cursor = rendered.message_token_spans(), 0
    borders = []
    for number in range(num_messages):
        span = spans[number] if number < len(spans) else None
        stop = end if number == num_messages - 1 else max(cursor, span[1] if span else cursor)
        borders.append((cursor, stop))
        cursor = stop
    return borders


def _row(number: int, message: Message, span: slice, tokens: list[int], mask: list[bool], content: list[bool]) -> Row:
    text = message.get("content")
    return {
        "message": number,
        "parent": number - 1 if number else None,
        "role": message["role"],
        "content": text if text is None or isinstance(text, str) else json.dumps(text, ensure_ascii=False),
        "body": json.dumps(dict(message), ensure_ascii=False, separators=(",", ":")),
        "sampled": message["role"] == "assistant",
        "token_ids": tokens[span],
        "mask": mask[span],
        "is_content": content[span],
        "logprobs": [0.0] * (span.stop - span.start),
    }
