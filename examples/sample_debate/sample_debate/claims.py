"""The claims, who is right about them, and what statements cite: plain functions."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DIGITS = "0123456789"
LENGTH = 3
"""Digits of a list."""
MOST_CLAIMS = 10 * 10**LENGTH // 4
"""A quarter of all: fewer than twice the true ones, which are half of those drawn."""
AFFIRMATIVE, NEGATIVE = "affirmative", "negative"
CITE = "see"
"""The word that opens a citation of the list."""
CITATION = re.compile(rf"\b{CITE} ((?:[0-9] )*[0-9])(?! ?[0-9])")


@dataclass(frozen=True)
class Claim:
    """That a digit is in a list; true or not."""

    digit: str
    numbers: tuple[str, ...]

    @property
    def listed(self) -> str:
        """The list as text."""
        return " ".join(self.numbers)

    @property
    def truth(self) -> str:
        """Who is right."""
        return AFFIRMATIVE if self.digit in self.numbers else NEGATIVE


def claims(count: int, seed: int) -> Iterator[Claim]:
    """Yield `count` different claims about lists of three digits, half of them true; more begin with the same.

    Raises ValueError where there are not enough of them.
    """
    if count > MOST_CLAIMS:
        raise ValueError(f"{count} claims about {LENGTH} digits: at most {MOST_CLAIMS} are used; ask for fewer")
    draw = random.Random(seed)
    seen: set[Claim] = set()
    while len(seen) < count:
        numbers = tuple(draw.choice(DIGITS) for _ in range(LENGTH))
        pool = sorted(set(numbers)) if len(seen) % 2 == 0 else [each for each in DIGITS if each not in numbers]
        if not pool or (claim := Claim(draw.choice(pool), numbers)) in seen:
            continue
        seen.add(claim)
        yield claim


def cited(statement: str) -> str | None:
    """Return the list that a statement cites first, as text; None where it cites none."""
    found = CITATION.search(statement)
    return found.group(1) if found else None


def num_true_citations(statements: Sequence[str], listed: str) -> int:
    """Return how many statements cite the list as it is."""
    return sum(cited(statement) == listed for statement in statements)
