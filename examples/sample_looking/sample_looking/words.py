"""What a small byte-level tokenizer shall keep whole, so that conversations about pictures are short and train fast."""

from typing import Any

from chat_loop.wording import call, description

from sample_looking.pictures import REQUEST, TOOL

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Show a picture.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"title": "Name", "type": "string"}},
            "required": ["name"],
            "title": "lookArguments",
        },
    },
}
"""The tool as the server offers it; a test holds the two together."""
WORDS = ["user\n", "assistant\n", REQUEST]
"""The fixed texts of prompts and replies without a tool."""


def words() -> list[str]:
    """The fixed texts of conversations with the tool, its description foremost."""
    return [description([SCHEMA]), *call(TOOL, "name"), *WORDS]
