"""The texts, the prompt and the score: plain functions that need nothing but the standard library."""

import random
import re
from collections.abc import Iterator
from difflib import SequenceMatcher

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
OPENING, CLOSING = "<rev>", "</rev>"
ANSWER = re.compile(re.escape(OPENING) + "(.*?)" + re.escape(CLOSING), re.DOTALL)


def prompt(text: str) -> str:
    """The request to reverse `text`."""
    return f"Reverse inside {OPENING}: {text}"


def tagged(answer: str) -> str:
    """`answer` between the answer tags."""
    return f"{OPENING}{answer}{CLOSING}"


def similarity(completion: str, expected: str) -> float:
    """How close the first tagged answer is to `expected`: difflib's ratio, from 0 to 1; 0 without closed tags."""
    found = ANSWER.search(completion)
    if found is None:
        return 0.0
    return SequenceMatcher(None, found.group(1).strip(), expected, autojunk=False).ratio()


def texts(count: int, min_length: int, max_length: int, seed: int) -> Iterator[str]:
    """Yield `count` different texts; the first n are the same whatever `count` is.

    Raises ValueError where the lengths do not allow that many texts, or leave nothing to reverse.
    """
    if not 1 <= min_length <= max_length:
        raise ValueError(f"min_length {min_length} and max_length {max_length}: want 1 <= min_length <= max_length")
    possible = sum(len(ALPHABET) ** length for length in range(min_length, max_length + 1))
    if count > possible // 2:
        raise ValueError(
            f"{count} different texts of {min_length} to {max_length} letters: there are {possible}, and at most half "
            "of them are drawn; ask for fewer or allow longer texts"
        )
    draw = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        text = "".join(draw.choice(ALPHABET) for _ in range(draw.randint(min_length, max_length)))
        if text not in seen:
            seen.add(text)
            yield text
