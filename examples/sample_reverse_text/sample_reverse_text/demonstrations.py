"""Noisy demonstrations for a supervised warm start: all the forms an answer may take, mostly the wrong ones."""

import random
from collections.abc import Iterator

from chat_loop.demonstrating import command, read

from sample_reverse_text.texts import CLOSING, OPENING, prompt, tagged, texts

WORDS = ["user\n", "assistant\n", prompt(""), OPENING, CLOSING, "\n\n"]
"""What a small byte-level tokenizer shall keep whole: the fixed texts of prompts and replies."""


def demonstrations(
    count: int,
    *,
    seed: int,
    right: float = 0.2,
    untagged: float = 0.4,
    min_length: int = 3,
    max_length: int = 6,
) -> Iterator[dict[str, str]]:
    """Yield `count` rows of prompt and completion.

    A share `right` is reversed and tagged, a share `untagged` is the text as given without tags, and the rest is
    tagged but not reversed. Raises ValueError where the two shares are negative or exceed 1 together.
    """
    if min(right, untagged) < 0 or right + untagged > 1:
        raise ValueError(f"right {right} and untagged {untagged}: shares from 0 to 1 that sum to at most 1")
    # Which form a row takes must not follow from its text, or the model could learn the rule.
    draw = random.Random(f"forms {seed}")
    for text in texts(count, min_length, max_length, seed):
        kind = draw.random()
        if kind < right:
            completion = tagged(text[::-1])
        elif kind < right + untagged:
            completion = text
        else:
            completion = tagged(text)
        yield {"prompt": prompt(text), "completion": completion}


def main() -> None:
    """Run the command line."""
    parser = command(__doc__)
    parser.add_argument("--right", type=float, default=0.2, help="share that is right")
    parser.add_argument("--untagged", type=float, default=0.4, help="share without tags")
    parser.add_argument("--min-length", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=6)
    files, choices = read(parser)
    files.write(demonstrations(**choices), WORDS)


if __name__ == "__main__":
    main()
