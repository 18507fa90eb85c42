"""The names, the user's words and the scores: plain functions that need nothing but the standard library."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain
from math import perm

_NAMES = """
    Ada Bob Cleo Dora Eve Finn Gus Hal Ida Jan Kim Leo Mia Ned Ola Pam Quin Ray Sue Tom Una Vic Wes Xena Yan Zoe
    Abe Bea Cal Dan Eli Fay Gil Hana Ian Jill Kai Lou Max Nora Otto Pia Quade Rex Sam Tess Uma Vera Will Xavi Yuri Zack
    Amy Ben Cora Dirk Emma Fred Gwen Hugo Iris Joe Kate Lars Meg Nils Omar Paul Quanah Rosa Saul Theo Ulf Vince Walt
    Ximena Yves Zara Anna Boris Carl Dina Erik Flora Greta Helga Ines Jonas Klara Linus Mona Nick Oskar Petra Quella
    Rita Stella Tina Ulla Vito Wanda Xander Yola Zeno
"""
NAMES = tuple(_NAMES.split())
"""The first 26 begin with a letter each, and so do the next: a few of them are easy to sort, all of them are not."""
ALL_NAMES = (*NAMES, *(f"{first}-{second}" for first in NAMES for second in NAMES))
"""With double names, for lists of hundreds."""


@dataclass(frozen=True)
class Conversation:
    """The names that the user gives, turn by turn."""

    turns: tuple[tuple[str, ...], ...]

    @property
    def answers(self) -> list[list[str]]:
        """What the list is after each turn."""
        return [sorted(chain(*self.turns[: number + 1])) for number in range(len(self.turns))]


@dataclass(frozen=True)
class Limits:
    """How long conversations and lists are."""

    min_turns: int
    max_turns: int
    min_words: int
    max_words: int
    num_names: int

    def __post_init__(self) -> None:
        """Raises ValueError where no conversation can be had."""
        for noun, low, high in (("turns", self.min_turns, self.max_turns), ("words", self.min_words, self.max_words)):
            if not 1 <= low <= high:
                raise ValueError(f"min_{noun} {low} and max_{noun} {high}: want 1 <= min_{noun} <= max_{noun}")
        longest = self.max_turns * self.max_words
        if not longest <= self.num_names <= len(ALL_NAMES):
            raise ValueError(
                f"num_names {self.num_names}: {self.max_turns} turns of {self.max_words} names take {longest} "
                f"different ones, and there are {len(ALL_NAMES)}"
            )

    @property
    def num_longest(self) -> int:
        """How many conversations there are of the most turns with the most names."""
        return perm(self.num_names, self.max_turns * self.max_words)


def conversations(count: int, limits: Limits, seed: int) -> Iterator[Conversation]:
    """Yield `count` different conversations; the first n are the same whatever `count` is.

    No name comes twice in one. Raises ValueError where there may be too few.
    """
    if count > limits.num_longest // 2:
        raise ValueError(
            f"{count} conversations of {limits.num_names} names: at most {limits.num_longest // 2} are drawn; ask for "
            "fewer, or allow more names"
        )
    draw = random.Random(seed)
    seen: set[Conversation] = set()
    while len(seen) < count:
        conversation = _drawn(draw, limits)
        if conversation not in seen:
            seen.add(conversation)
            yield conversation


def _drawn(draw: random.Random, limits: Limits) -> Conversation:
    num_turns = draw.randint(limits.min_turns, limits.max_turns)
    lengths = [draw.randint(limits.min_words, limits.max_words) for _ in range(num_turns)]
    names = iter(draw.sample(ALL_NAMES[: limits.num_names], sum(lengths)))
    return Conversation(tuple(tuple(next(names) for _ in range(length)) for length in lengths))


def asked(names: Sequence[str], tag: str, first: bool) -> str:
    """What the user says in a turn: sort these in the first one, add these afterwards."""
    return f"{'Sort' if first else 'Add'} inside <{tag}>: {' '.join(names)}"


def tagged(names: Sequence[str], tag: str) -> str:
    """`names` between the tags."""
    return f"<{tag}>{' '.join(names)}</{tag}>"


def listed(reply: str, tag: str) -> list[str] | None:
    """The names between the first pair of tags of a reply; None where there is no such pair."""
    _, opening, rest = reply.partition(f"<{tag}>")
    inside, closing, _ = rest.partition(f"</{tag}>")
    return inside.replace(",", " ").split() if opening and closing else None


def similarity(reply: str, expected: Sequence[str], tag: str) -> float:
    """How close the tagged list of a reply is to the expected one: difflib's ratio over names, 0 without tags."""
    found = listed(reply, tag)
    return SequenceMatcher(None, found, list(expected), autojunk=False).ratio() if found is not None else 0.0


def score(replies: Sequence[str], answers: Sequence[Sequence[str]], tag: str, power: float) -> float:
    """The mean of the turns' similarities, each to the `power`; a turn without a reply counts as 0."""
    earned = [similarity(reply, answer, tag) ** power for reply, answer in zip(replies, answers, strict=False)]
    return sum(earned) / len(answers)
