"""What a small byte-level tokenizer shall keep whole, so that conversations with a tool are short and train fast."""

from typing import Any

from chat_loop.wording import call, description

from sample_lookup.chains import CLOSING, OPENING, REMINDER, TOOL, prompt

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


def words() -> list[str]:
    """The fixed texts of these conversations under Qwen3's template, the description of the tool foremost."""
    own = [prompt(""), REMINDER, OPENING, CLOSING, "see ", "is "]
    return [description([SCHEMA]), *call(TOOL, "name"), *own, "user", "assistant", "\n\n"]
