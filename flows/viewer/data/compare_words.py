"""Words: what two texts have in common and what only one has, word by word; bounded, whatever a model wrote."""

import re
from difflib import SequenceMatcher
from itertools import takewhile
from operator import eq
from typing import Any

from flows.viewer.texts import cut

LONGEST = 20_000
"""Characters of a text that are compared and shown."""
MOST_WORDS = 1_200
"""Words in the middle, between what both begin and end with, that are compared: the time grows with their square."""
SAME, OWN, APART = "same", "own", "apart"
"""In both texts, in this one alone, and too much to be compared."""
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
Piece = dict[str, str]


def compared_words(a: str, b: str) -> tuple[list[Piece], list[Piece]]:
    """Return both texts as pieces in order, each `text` and `kind`: same, own, or apart, which nobody compared.

    The pieces of a text are the text again, as far as it is shown: its first LONGEST characters.
    """
    one, other = (_WORDS.findall(cut(each, LONGEST)[0]) for each in (a, b))
    head = sum(1 for _ in takewhile(bool, map(eq, one, other)))
    tail = sum(1 for _ in takewhile(bool, map(eq, reversed(one[head:]), reversed(other[head:]))))
    middle = [words[head : len(words) - tail] for words in (one, other)]
    found = _pieces(*middle)
    ends = [(one[:head], one[len(one) - tail :]), (other[:head], other[len(other) - tail :])]
    first, second = (
        _joined([(SAME, begin), *pieces, (SAME, end)]) for (begin, end), pieces in zip(ends, found, strict=True)
    )
    return first, second


def shown_of(text: str) -> dict[str, Any]:
    """Return what of a text is shown, and how many characters are left out."""
    head, left_out = cut(text, LONGEST)
    return {"text": head, "left_out": left_out}


def _pieces(one: list[str], other: list[str]) -> tuple[list[tuple[str, list[str]]], list[tuple[str, list[str]]]]:
    near = one[:MOST_WORDS], other[:MOST_WORDS]
    found: tuple[list[tuple[str, list[str]]], list[tuple[str, list[str]]]] = ([], [])
    for kind, a1, a2, b1, b2 in SequenceMatcher(None, near[0], near[1]).get_opcodes():
        how = SAME if kind == "equal" else OWN
        found[0].append((how, near[0][a1:a2]))
        found[1].append((how, near[1][b1:b2]))
    for pieces, words in zip(found, (one, other), strict=True):
        pieces.append((APART, words[MOST_WORDS:]))
    return found


def _joined(pieces: list[tuple[str, list[str]]]) -> list[Piece]:
    """Return pieces as texts; empty ones are left out, neighbours of one kind are one."""
    joined: list[Piece] = []
    for kind, words in pieces:
        if words and joined and joined[-1]["kind"] == kind:
            joined[-1]["text"] += "".join(words)
        elif words:
            joined.append({"kind": kind, "text": "".join(words)})
    return joined
