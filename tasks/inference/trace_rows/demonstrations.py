"""Renders demonstrations: as message rows to train on, or as tokens that a policy is shown before a prompt."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.inference.engine import model_info
from tasks.inference.engine.client import Engine
from tasks.inference.engine.scoring import NotScorable, ServedModel
from tasks.inference.trace_rows.rows import Row

if TYPE_CHECKING:
    from configs.algorithms import OpsdConfig
    from configs.sections import ModelConfig


Message = Mapping[str, Any]


class DemonstrationUnusable(ValueError):
    """The renderer cannot turn a conversation into a training sample."""


def demonstration_renderer(
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
    opening = _prompt_ending(made) if settings else []
    return lambda messages, tools=None: _render_rows(messages, made, opening, tools)


def demonstration_rows(messages: Sequence[Message], tokenizer_dir: str | Path, name: str) -> list[Row]:
    """Return one row for each message, with the columns of the messages table except the trace's id.

    The rows' tokens joined together are what the renderer makes of the conversation, up to the end of the last
    assistant message; `mask` is true on what a policy would sample: the body of an assistant message and its end token.
    Raises DemonstrationUnusable where the conversation does not end with an assistant message.
    """
    return demonstration_renderer(tokenizer_dir, name)(messages)


def _render_rows(
    messages: Sequence[Message], made: Any, opening: list[int], tools: Sequence[Message] | None = None
) -> list[Row]:
    if not messages or messages[-1]["role"] != "assistant":
        raise DemonstrationUnusable(
            f"a demonstration ends with an assistant message; this one has the roles "
            f"{[message['role'] for message in messages]}"
        )
    rendered = made.render([dict(message) for message in messages], tools=tools)
    tokens = list(rendered.token_ids)
    mask = _unmask(opening, tokens, _sampled_mask(messages, made, rendered, tools))
    if not any(mask):
        raise DemonstrationUnusable("the renderer marks no token of this demonstration as the assistant's")
    end = max(index for index, sampled in enumerate(mask) if sampled) + 1
    stops = made.get_stop_token_ids()
    if tokens[end - 1] not in stops:  # some templates leave the last turn open; a policy must learn to end it
        tokens[end:], mask[end:] = [stops[0]], [True]
        end += 1
    content = rendered.is_content[:end] if rendered.is_content else []
    content += [True] * (end - len(content)) if content else []
    starts = _message_spans(rendered, len(messages), end)
    return [
        _message_row(number, message, slice(*span), tokens, mask, content)
        for number, (message, span) in enumerate(zip(messages, starts, strict=True))
    ]


def _sampled_mask(messages: Sequence[Message], made: Any, rendered: Any, tools: Sequence[Message] | None) -> list[bool]:
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


def _prompt_ending(made: Any) -> list[int]:
    """What every prompt ends with, so that a policy goes on from there: the role, or an empty thought after it."""
    prompt = made.render([{"role": "user", "content": ""}], add_generation_prompt=True)
    return [token for token, index in zip(prompt.token_ids, prompt.message_indices, strict=True) if index < 0]


def _unmask(opening: list[int], tokens: list[int], mask: list[bool]) -> list[bool]:
    """The mask without `opening`, wherever it is in the tokens: a policy is given it."""
    for start in range(len(tokens) - len(opening) if opening else 0):
        if tokens[start : start + len(opening)] == opening:
            mask[start : start + len(opening)] = [False] * len(opening)
    return mask


def _message_spans(rendered: Any, num_messages: int, end: int) -> list[tuple[int, int]]:
    """Where each message's tokens begin and end; what lies between two messages belongs to the later one."""
    spans, cursor = rendered.message_token_spans(), 0
    borders = []
    for number in range(num_messages):
        span = spans[number] if number < len(spans) else None
        stop = end if number == num_messages - 1 else max(cursor, span[1] if span else cursor)
        borders.append((cursor, stop))
        cursor = stop
    return borders


def _message_row(
    number: int, message: Message, span: slice, tokens: list[int], mask: list[bool], content: list[bool]
) -> Row:
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


class DemonstrationPrompt:
    """Makes what is shown, as a system message in the model's own format; the tokenizer is loaded once."""

    def __init__(self, settings: "OpsdConfig", model: "ModelConfig", at: Callable[[], ServedModel]) -> None:
        self._settings = settings
        self._model = model
        self._at = at
        self._known: dict[str, list[int]] = {}

    def prepend(self, trace: Row, tokens: Sequence[int]) -> list[int]:
        """Return tokens of a trace with what is shown before them; `trace` is a row of traces.

        What begins every conversation once stays in front of all and is not there a second time. Raises NotScorable
        where neither the trace's info nor its task holds a demonstration.
        """
        text = self._settings.template.replace(
            "{demonstration}", demonstration_text(trace, self._settings.demonstration)
        )
        if text not in self._known:
            self._known[text] = self._tokens(("system", text))
        begin = self._beginning if list(tokens[: len(self._beginning)]) == self._beginning else []
        return [*self._known[text], *tokens[len(begin) :]]

    @cached_property
    def _beginning(self) -> list[int]:
        """The tokens that a conversation begins with, whoever speaks first, and that it has nowhere else."""
        system, user, both = ("system", "x"), ("user", "x"), self._tokens(("system", "x"), ("user", "x"))
        found = []
        for one, other in zip(self._tokens(system), self._tokens(user), strict=False):
            if one != other or both.count(one) > 1:
                break
            found.append(one)
        return found

    def _tokens(self, *messages: tuple[str, str]) -> list[int]:
        rendered = self._renderer.render([{"role": role, "content": text} for role, text in messages])
        return list(rendered.token_ids)

    @cached_property
    def _renderer(self) -> Any:
        from renderers import create_renderer
        from renderers.base import load_tokenizer

        tokenizer = self._model.tokenizer or self._model.path or self._served_from()
        config = model_info.renderer_config(self._model.renderer, tokenizer, self._model.renderer_settings)
        return create_renderer(load_tokenizer(tokenizer), config)

    def _served_from(self) -> str:
        served = self._at()
        return Engine(served.url, served.api_key).model_directory()


def demonstration_text(trace: Row, field: str) -> str:
    """Return the demonstration of a trace: the field of what its environment noted, or else of the example's task.

    Text is taken as it is, other values as JSON. Raises NotScorable where there is none, or an empty one.
    """
    task = json.loads(trace["record"]).get("task", {})
    for place in (json.loads(trace["info"]), task.get("data", task)):
        value = place.get(field)
        if value not in (None, ""):
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    raise NotScorable(
        f"environment {trace['environment']}, example {trace['example_id']} (trace {trace['trace_id']}): neither its "
        f"info nor its task has a field {field!r} that holds a demonstration. Nothing was scored; the rows are safe. "
        "Name the field that does (algorithm.demonstration)"
    )
