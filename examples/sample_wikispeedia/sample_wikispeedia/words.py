"""What a small byte-level tokenizer shall keep whole, so that conversations with tools are short and train fast."""

from typing import Any

from chat_loop.wording import call, description

from sample_wikispeedia.graph import Graph
from sample_wikispeedia.walk import BACK, CLICK

CLICK_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": CLICK,
        "description": "Follow a link.",
        "parameters": {
            "type": "object",
            "properties": {"page": {"title": "Page", "type": "string"}},
            "required": ["page"],
            "title": "click_linkArguments",
        },
    },
}
BACK_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": BACK,
        "description": "Return to the page before.",
        "parameters": {"type": "object", "properties": {}, "title": "go_backArguments"},
    },
}
SCHEMAS = [CLICK_SCHEMA, BACK_SCHEMA]
"""The tools as the server offers them; a test holds the two together."""


def words(links: Graph) -> list[str]:
    """The fixed texts of these conversations under Qwen3's template, the description of the tools foremost."""
    fixed = ["Go from ", " to ", ": ", "no link ", "nothing to go back to; ", "user", "assistant", "\n\n"]
    back = f'\n{{"name": "{BACK}", "arguments": {{}}}}\n'
    return [description(SCHEMAS), *call(CLICK, "page"), back, *fixed, *links]
