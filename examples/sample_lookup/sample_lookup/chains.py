"""The store, the prompt and the scores: plain functions that need nothing but the standard library."""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
NAME_LENGTH, VALUE_LENGTH = 3, 2
OPENING, CLOSING = "<ans>", "</ans>"
ANSWER = re.compile(re.escape(OPENING) + "(.*?)" + re.escape(CLOSING), re.DOTALL)
TOOL = "lookup"
REMINDER = f"Call {TOOL} or answer in {OPENING}"
"""What the user says to a reply that neither calls the tool nor answers."""


@dataclass(frozen=True)
class Chain:
    """Names that lead from one to the next, and the value under the last of them."""

    names: tuple[str, ...]
    value: str

    @property
    def entries(self) -> dict[str, str]:
        """What the store says of each name."""
        following = [f"see {name}" for name in self.names[1:]]
        return dict(zip(self.names, [*following, f"is {self.value}"], strict=True))


def chains(count: int, num_hops: int, seed: int) -> Iterator[Chain]:
    """Yield `count` chains of `num_hops` names each, all different; the first n are the same whatever `count` is.

    Raises ValueError where there are not enough names.
    """
    possible = len(LETTERS) ** NAME_LENGTH
    if count * num_hops > possible // 2:
        raise ValueError(
            f"{count} chains of {num_hops} names: there are {possible} names, and at most half of them are used; ask "
            "for fewer"
        )
    draw = random.Random(seed)
    seen: set[str] = set()
    for _ in range(count):
        names = tuple(_fresh(draw, seen) for _ in range(num_hops))
        yield Chain(names, "".join(draw.choice(DIGITS) for _ in range(VALUE_LENGTH)))


def _fresh(draw: random.Random, seen: set[str]) -> str:
    """A name that was not drawn before."""
    while True:
        name = "".join(draw.choice(LETTERS) for _ in range(NAME_LENGTH))
        if name not in seen:
            seen.add(name)
            return name


def store(all_chains: Iterable[Chain]) -> dict[str, str]:
    """Everything that the tool can find."""
    return {name: entry for chain in all_chains for name, entry in chain.entries.items()}


def prompt(name: str) -> str:
    """The request to find what is under `name`."""
    return f"Find {name}"


def tagged(answer: str) -> str:
    """`answer` between the answer tags."""
    return f"{OPENING}{answer}{CLOSING}"


def answered(reply: str) -> bool:
    """Whether a reply holds an answer, right or wrong."""
    return ANSWER.search(reply) is not None


def is_right(reply: str, value: str) -> bool:
    """Whether the first tagged answer of a reply is `value`."""
    found = ANSWER.search(reply)
    return found is not None and found.group(1).strip() == value


def reached(results: Sequence[str], names: Sequence[str], value: str) -> int:
    """How many entries of a chain the tool's results hold, counted from the first name until one is missing."""
    entries = list(Chain(tuple(names), value).entries.values())
    num_found = 0
    while num_found < len(entries) and entries[num_found] in results:
        num_found += 1
    return num_found
