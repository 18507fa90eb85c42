"""Words for made-up rollouts: a vocabulary, and token ids as the text that they would be."""

from functools import cache

import numpy as np
import numpy.typing as npt

VOCABULARY = 4096
FIRST_WORD = 32
"""Token ids below it are those of a chat template."""
RARE = 4000
"""Token ids from it on are never drawn, only put where gibberish is to be found."""
START, END, NEWLINE = 1, 2, 3
ROLES = ("system", "user", "assistant", "tool")
ROLE_TOKEN = {name: 4 + number for number, name in enumerate(ROLES)}
_SYLLABLES = ("ba", "co", "di", "fu", "ga", "he", "ki", "lo", "mu", "na", "pe", "qua", "ri", "so", "ti", "ve")

Integers = npt.NDArray[np.int64]


@cache
def words() -> npt.NDArray[np.object_]:
    """Return the word of every token id; shape [VOCABULARY]."""
    size = len(_SYLLABLES)
    made = [
        _SYLLABLES[number % size] + _SYLLABLES[number // size % size] + _SYLLABLES[number // size**2 % size]
        for number in range(VOCABULARY)
    ]
    return np.array(made, object)


def drawn(chance: np.random.Generator, count: int) -> Integers:
    """Return so many token ids of words, a few of them often and most of them seldom, as in a language."""
    ranks = chance.random(count) ** 3 * (RARE - FIRST_WORD)
    return ranks.astype(np.int64) + FIRST_WORD


def spoken(token_ids: Integers) -> str:
    """Return token ids of words as text."""
    return " ".join(words()[token_ids])
