"""What a small byte-level tokenizer shall keep whole, so that conversations with a tool are short and train fast."""

from typing import Any

from chat_loop.wording import call, description

from sample_calc_tools.sums import CLOSING, OPENING, REFUSED, TOOL

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Work out one operation.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"title": "Expression", "type": "string"}},
            "required": ["expression"],
            "title": "calcArguments",
        },
    },
}
"""The tool as the server offers it; a test holds the two together."""


def words() -> list[str]:
    """The fixed texts of these conversations under Qwen3's template, the description of the tool foremost."""
    fixed = ["Work out ", REFUSED, OPENING, CLOSING, "user", "assistant", "\n\n"]
    return [description([SCHEMA]), *call(TOOL, "expression"), *fixed]
