"""Texts that every conversation with the same tools begins with, for tokenizers that shall keep them whole."""

from collections.abc import Sequence
from typing import Any

from chat_loop.tools import Message


class Noted:
    """As much of a tokenizer as a renderer asks for; it notes every text that it is given."""

    unk_token_id = None

    def __init__(self) -> None:
        self.texts: list[str] = []

    def convert_tokens_to_ids(self, token: str) -> int:
        """Any number will do."""
        return len(token)

    def encode(self, text: str, **_: Any) -> list[int]:
        """One token for the whole text."""
        self.texts.append(text)
        return [0]


def description(tools: Sequence[Message]) -> str:
    """The text in which Qwen3's template describes `tools`, which are as the chat completions API takes them."""
    from renderers import Qwen3Renderer

    noted = Noted()
    Qwen3Renderer(noted).render([{"role": "user", "content": ""}], tools=list(tools))
    names = [tool["function"]["name"] for tool in tools]
    return next(text for text in noted.texts if all(f'"name": "{name}"' in text for name in names))


def call(tool: str, argument: str) -> tuple[str, str]:
    """What stands before and after the only argument, a text, of a call of `tool` as Qwen3 writes it."""
    return f'\n{{"name": "{tool}", "arguments": {{"{argument}": "', '"}}\n'
