"""Noisy demonstrations for a supervised warm start: a number after each picture, mostly any."""

import json
import random
from collections.abc import Iterator
from typing import Any

from chat_loop.demonstrating import command, read

from sample_looking.pictures import COUNTS, REQUEST, TOOL, picture_names, pictures, request_by_name
from sample_looking.words import SCHEMA, WORDS, words

Message = dict[str, Any]


def demonstrations(count: int, *, seed: int, right: float = 0.5) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of prompt and completion: a share `right` has the picture's number, the others have any.

    Raises ValueError where the share is none.
    """
    for shown, said in _answered(count, seed, right):
        yield {"prompt": [{"role": "user", "content": [*shown, {"type": "text", "text": REQUEST}]}], "completion": said}


def tool_demonstrations(count: int, *, seed: int, right: float = 0.5) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of messages and tools: a call that names the picture, the picture, and a number as above."""
    names = picture_names(count, seed)
    for name, (shown, said) in zip(names, _answered(count, seed, right), strict=True):
        function = {"name": TOOL, "arguments": json.dumps({"name": name})}
        calls = [{"id": "call", "type": "function", "function": function}]
        messages = [
            {"role": "user", "content": request_by_name(name)},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call", "name": TOOL, "content": shown},
            {"role": "assistant", "content": said},
        ]
        yield {"messages": messages, "tools": [SCHEMA]}


def _answered(count: int, seed: int, right: float) -> Iterator[tuple[list[Message], str]]:
    """Yield pictures as parts of a message, each with what is said of it."""
    if not 0 <= right <= 1:
        raise ValueError(f"right {right}: a share from 0 to 1")
    draw = random.Random(f"numbers {seed}")
    # Other pictures than those of the taskset, whose seeds are small.
    for picture in pictures(count, seed + 1_000_003):
        said = picture.count if draw.random() < right else draw.choice(COUNTS)
        yield [{"type": "image_url", "image_url": {"url": picture.url}}], str(said)


def main() -> None:
    """Run the command line."""
    parser = command(__doc__)
    parser.add_argument("--right", type=float, default=0.5, help="share that is right")
    parser.add_argument("--tool", action="store_true", help="the model looks at the picture with a tool")
    files, choices = read(parser)
    if choices.pop("tool"):
        files.write(tool_demonstrations(**choices), words())
    else:
        files.write(demonstrations(**choices), WORDS)


if __name__ == "__main__":
    main()
