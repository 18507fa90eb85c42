"""Renders demonstrations: as message rows to train on (SFT), or as a prompt before a trace's tokens (OPSD)."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.inference.engine import model_info
from tasks.inference.engine.client import NotScorable
from tasks.inference.trace_rows.rows import Row, compact_json, message_text
from tasks.runtime.torchvision_operators import declare_torchvision_operators

if TYPE_CHECKING:
    from configs.algorithms import OpsdConfig
    from configs.sections import ModelConfig


Message = Mapping[str, Any]


MEDIA = ("image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "url", "path")
"""Fields of a message's part that may say where an image, or the like, lies."""


class DemonstrationUnusable(ValueError):
    """The renderer cannot turn a conversation into a training sample."""


class DemonstrationRenderer:
    """Turns messages, and optional tools, into rows of the messages table: see `demonstration_renderer`."""

    def __init__(self, renderer: Any, prompt_end: Sequence[int] = ()) -> None:
        """`prompt_end` are tokens that every prompt ends with, and that are not sampled."""
        self._renderer, self._prompt_end = renderer, list(prompt_end)
        self.token_types: dict[int, int] = dict(getattr(renderer, "mm_token_type_id_map", None) or {})
        """The type of each token id that stands for something else than text."""

    def __call__(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> list[Row]:
        """Return the rows of a conversation."""
        roles = [message["role"] for message in messages]
        if roles[-1:] != ["assistant"]:
            text = f"a demonstration ends with an assistant message; this one has the roles {roles}"
            raise DemonstrationUnusable(text)
        for number, message in enumerate(messages):
            _require_inner_media(number, message)
        rendered = self._renderer.render([dict(message) for message in messages], tools=tools)
        tokens = list(rendered.token_ids)
        mask = list(rendered.sampled_mask) or self._mask_by_prompts(messages, tokens, tools)
        size = len(self._prompt_end)
        for start in range(len(tokens) - size) if size else ():
            if tokens[start : start + size] == self._prompt_end:
                mask[start : start + size] = [False] * size
        if not any(mask):
            raise DemonstrationUnusable("the renderer marks no token of this demonstration as the assistant's")
        # What follows the last sampled token, as a line break of the template, was never sampled and is not trained.
        end = len(mask) - mask[::-1].index(True)
        content = list(rendered.is_content[:end])
        stops = self._renderer.get_stop_token_ids()
        if tokens[end - 1] not in stops:  # some templates leave the last turn open, and a policy must learn to end it
            tokens[end:], mask[end:] = [stops[0]], [True]
            end += 1
        content += [True] * (end - len(content)) if content else []
        rows, start, spans = list[Row](), 0, rendered.message_token_spans()
        for number, message in enumerate(messages):
            # Tokens between two messages belong to the later one.
            span = spans[number] if number < len(spans) else None
            stop = end if number == len(messages) - 1 else max(start, span[1] if span else start)
            part = slice(start, stop)
            columns = {"token_ids": tokens[part], "mask": mask[part], "is_content": content[part]}
            rows.append(_message_columns(number, message) | columns | {"logprobs": [0.0] * (stop - start)})
            start = stop
        return rows

    def reply(
        self, prompt: Sequence[Message], reply: Message, tools: Sequence[Message] | None
    ) -> tuple[Any, list[int]]:
        """Return the rendered prompt (renderers' RenderedTokens) and the tokens of a reply, its end token included.

        Raises DemonstrationUnusable where the reply's tokens cannot be told from the prompt's, or read as another one.
        """
        tokens = [token for row in self([*prompt, reply], tools) for token in row["token_ids"]]
        before = self._renderer.render([dict(each) for each in prompt], tools=tools, add_generation_prompt=True)
        start = len(before.token_ids)
        if tokens[:start] != list(before.token_ids):
            raise DemonstrationUnusable(
                "the renderer writes the prompt differently once the reply follows, so their tokens cannot be told "
                "apart. Where only one of teacher and model reasons, set model.renderer_settings (enable_thinking)"
            )
        parsed = self._renderer.parse_response(tokens[start:], tools=tools, prompt_ids=tokens[:start])
        calls = [call["function"] for call in reply.get("tool_calls") or ()]
        written = _plain(reply.get("content"), reply.get("reasoning_content"), calls)
        read = _plain(parsed.content, parsed.reasoning_content, [vars(call) for call in parsed.tool_calls])
        if written != read:
            raise DemonstrationUnusable(f"the renderer writes {written!r:.200} and reads {read!r:.200}")
        return before, tokens[start:]

    def _mask_by_prompts(
        self, messages: Sequence[Message], tokens: Sequence[int], tools: Sequence[Message] | None
    ) -> list[bool]:
        """Return for each token whether a policy would sample it, for a renderer around an opaque template.

        These are the tokens after a turn's generation prompt, up to one that stops.
        """
        mask, stops = [False] * len(tokens), set(self._renderer.get_stop_token_ids())
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = [dict(earlier) for earlier in messages[:number]]
            prompt = self._renderer.render(before, tools=tools, add_generation_prompt=True).token_ids
            if list(tokens[: len(prompt)]) != list(prompt):
                raise DemonstrationUnusable(
                    f"message {number}: the template renders what comes before it differently once it is there, so its "
                    "tokens cannot be told from the prompt's. Name a renderer of the model's family in model.renderer"
                )
            end = next((n for n in range(len(prompt), len(mask)) if tokens[n] in stops), len(mask) - 1)
            mask[len(prompt) : end + 1] = [True] * (end + 1 - len(prompt))
        return mask


def demonstration_renderer(
    tokenizer_dir: str | Path, name: str, settings: Mapping[str, Any] | None = None
) -> DemonstrationRenderer:
    """Return a function from messages, and optional tools, to rows of the messages table without the trace's id.

    There is one row for each message. The rows' tokens joined together are the renderer's tokens of the conversation,
    up to the end of the last assistant message; `mask` is true on what a policy would sample: the body of an assistant
    message and its end token. The function raises DemonstrationUnusable where the conversation does not end with an
    assistant message. `settings` are those of the renderer called `name`; it and the tokenizer are loaded once.
    """
    renderer = load_renderer(str(tokenizer_dir), name, settings or {})
    if not settings:  # only settings can make prompts end with more than the role, such as an empty thought
        return DemonstrationRenderer(renderer)
    prompt = renderer.render([{"role": "user", "content": ""}], add_generation_prompt=True)
    places = zip(prompt.token_ids, prompt.message_indices, strict=True)
    return DemonstrationRenderer(renderer, [token for token, index in places if index < 0])


def load_renderer(tokenizer: str, name: str, settings: Mapping[str, Any]) -> Any:
    """Return the renderer called `name`, of the renderers package, for the tokenizer in a directory."""
    declare_torchvision_operators()  # renderers of models that see load a processor
    from renderers import create_renderer
    from renderers.base import load_tokenizer

    return create_renderer(load_tokenizer(tokenizer), model_info.renderer_config(name, tokenizer, settings))


def _plain(content: Any, reasoning: Any, calls: Sequence[Message]) -> tuple[Any, ...]:
    """Return the parts of a reply that must survive: arguments as values, texts without the spaces around them."""
    arguments = [call["arguments"] for call in calls]
    values = [json.loads(value) if isinstance(value, str) else value for value in arguments]
    return (content or "").strip(), (reasoning or "").strip(), [call["name"] for call in calls], values


def _require_inner_media(number: int, message: Message) -> None:
    """Raise DemonstrationUnusable for an image, or the like, at an address: renderers go there, or open the file."""
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        for value in (part[name] for name in MEDIA if name in part):
            address = value.get("url") if isinstance(value, Mapping) else value
            if isinstance(address, str) and not address.startswith("data:"):
                raise DemonstrationUnusable(
                    f"message {number}: a part names {address[:80]!r}. Nothing is loaded from elsewhere, and no file "
                    "is opened: put it into the message as a data URL"
                )


def _message_columns(number: int, message: Message) -> Row:
    content = message.get("content")
    if isinstance(content, list) and any(part.get(field) for part in content for field in MEDIA):
        content = message_text(content)
    return {
        "message": number,
        "parent": number - 1 if number else None,
        "role": message["role"],
        "content": content if content is None or isinstance(content, str) else json.dumps(content, ensure_ascii=False),
        "body": compact_json(dict(message)),
        "sampled": message["role"] == "assistant",
    }


class DemonstrationPrompt:
    """A system message with a demonstration before a trace's tokens; the tokenizer is loaded once.

    Used by on-policy self-distillation, in which the reference is the policy itself with a demonstration in its prompt.
    """

    def __init__(self, settings: "OpsdConfig", model: "ModelConfig") -> None:
        self._settings = settings
        self._model = model
        self._tokens_of: dict[str, list[int]] = {}

    def prepend(self, trace: Row, tokens: Sequence[int]) -> list[int]:
        """Return a trace's tokens with the demonstration's before them; `trace` is a row of traces.

        Tokens that begin every conversation stay first and are not repeated. Raises NotScorable where neither the
        trace's info nor its task holds a demonstration.
        """
        text = self._settings.template.replace(
            "{demonstration}", demonstration_text(trace, self._settings.demonstration)
        )
        if text not in self._tokens_of:  # the samples of a group share their demonstration
            self._tokens_of[text] = self._render(("system", text))
        start = self._start if list(tokens[: len(self._start)]) == self._start else []
        return [*self._tokens_of[text], *tokens[len(start) :]]

    @cached_property
    def _start(self) -> list[int]:
        """The tokens that every conversation begins with, whatever its first role, and that occur only there."""
        system, user, both = ("system", "x"), ("user", "x"), self._render(("system", "x"), ("user", "x"))
        start = []
        # A token that comes again between messages begins every message, and not only the conversation.
        for one, other in zip(self._render(system), self._render(user), strict=False):
            if one != other or both.count(one) > 1:
                break
            start.append(one)
        return start

    def _render(self, *messages: tuple[str, str]) -> list[int]:
        rendered = self._renderer.render([{"role": role, "content": text} for role, text in messages])
        return list(rendered.token_ids)

    @cached_property
    def _renderer(self) -> Any:
        model = self._model
        return load_renderer(model.tokenizer or model.path, model.renderer, model.renderer_settings)


def demonstration_text(trace: Row, field: str) -> str:
    """Return the demonstration of a trace: a field of its info, or else of the example's task.

    Text is returned as it is, other values as JSON. Raises NotScorable where there is none, or an empty one.
    """
    task = json.loads(trace["record"]).get("task", {})
    for source in (json.loads(trace["info"]), task.get("data", task)):
        value = source.get(field)
        if value not in (None, ""):
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    raise NotScorable(
        f"environment {trace['environment']}, example {trace['example_id']} (trace {trace['trace_id']}): neither its "
        f"info nor its task has a field {field!r} that holds a demonstration. Nothing was scored; the rows are safe. "
        "Name the field that does (algorithm.demonstration)"
    )
