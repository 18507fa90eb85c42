"""Noisy demonstrations for a supervised warm start: a number after each picture, mostly any."""

import random
from collections.abc import Iterator
from typing import Any

from chat_loop.demonstrating import command, read

from sample_looking.pictures import COUNTS, REQUEST, pictures

WORDS = ["user\n", "assistant\n", REQUEST]
"""What a small byte-level tokenizer shall keep whole: the fixed texts of prompts and replies."""


def demonstrations(count: int, *, seed: int, right: float = 0.5) -> Iterator[dict[str, Any]]:
    """Yield `count` rows of prompt and completion: a share `right` has the picture's number, the others have any.

    Raises ValueError where the share is none.
    """
    if not 0 <= right <= 1:
        raise ValueError(f"right {right}: a share from 0 to 1")
    draw = random.Random(f"numbers {seed}")
    # Other pictures than those of the taskset, whose seeds are small.
    for picture in pictures(count, seed + 1_000_003):
        said = picture.count if draw.random() < right else draw.choice(COUNTS)
        content = [{"type": "image_url", "image_url": {"url": picture.url}}, {"type": "text", "text": REQUEST}]
        yield {"prompt": [{"role": "user", "content": content}], "completion": str(said)}


def main() -> None:
    """Run the command line."""
    parser = command(__doc__)
    parser.add_argument("--right", type=float, default=0.5, help="share that is right")
    files, choices = read(parser)
    files.write(demonstrations(**choices), WORDS)


if __name__ == "__main__":
    main()
