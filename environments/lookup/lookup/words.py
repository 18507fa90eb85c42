"""What a small byte-level tokenizer shall keep whole, so that conversations with a tool are short and train fast."""

from typing import Any

from lookup.chains import CLOSING, OPENING, REMINDER, TOOL, prompt

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Say what is under a name.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"title": "Name", "type": "string"}},
            "required": ["name"],
            "title": "lookupArguments",
        },
    },
}
"""The tool as the server offers it; a test holds the two together."""
CALL = (f'\n{{"name": "{TOOL}", "arguments": {{"name": "', '"}}\n')
"""A call as Qwen3 writes it, around the name."""


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


def words() -> list[str]:
    """The fixed texts of these conversations under Qwen3's template, the description of the tool foremost."""
    from renderers import Qwen3Renderer

    noted = Noted()
    Qwen3Renderer(noted).render([{"role": "user", "content": ""}], tools=[SCHEMA])
    system = next(text for text in noted.texts if TOOL in text)
    return [system, *CALL, prompt(""), REMINDER, OPENING, CLOSING, "see ", "is ", "user", "assistant", "\n\n"]
