"""The chains of operations, the prompt and the scores: plain functions that need nothing but the standard library."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OPENING, CLOSING = "<ans>", "</ans>"
ANSWER = re.compile(re.escape(OPENING) + "(.*?)" + re.escape(CLOSING), re.DOTALL)
EXPRESSION = re.compile(r"\s*(\d{1,9})\s*([+*-])\s*(\d{1,9})\s*")
TOOL = "calc"
REFUSED = "error: want one operation, as in 7+5"
"""What the tool answers to anything else."""
LARGEST = 99
"""No number of a chain is larger, and none is below zero: a number is at most two digits to copy."""
FIRST, OPERAND = (10, 99), (2, 9)


@dataclass(frozen=True)
class Chain:
    """A number to start from, and operations such as `+5` to apply one after the other."""

    first: int
    operations: tuple[str, ...]

    @property
    def calls(self) -> list[str]:
        """What to ask the calculator, in order."""
        numbers = [self.first, *self.results]
        return [f"{number}{operation}" for number, operation in zip(numbers, self.operations, strict=False)]

    @property
    def results(self) -> list[int]:
        """What the calculator says of each call; the last is the answer."""
        numbers: list[int] = []
        for operation in self.operations:
            numbers.append(applied(numbers[-1] if numbers else self.first, operation[0], int(operation[1:])))
        return numbers


def applied(left: int, sign: str, right: int) -> int:
    """`left + right`, `left - right` or `left * right`."""
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def calculated(expression: str) -> str:
    """What the tool answers: the value of one operation on two whole numbers, or what it wants to be asked."""
    found = EXPRESSION.fullmatch(expression)
    if found is None:
        return REFUSED
    return str(applied(int(found.group(1)), found.group(2), int(found.group(3))))


def chains(count: int, num_calls: int, seed: int) -> Iterator[Chain]:
    """Yield `count` different chains of `num_calls` operations; the first n are the same whatever `count` is.

    Raises ValueError where more than half of all chains are asked for.
    """
    possible = num_chains(num_calls)
    if count > possible // 2:
        raise ValueError(
            f"{count} chains of {num_calls} operations: there are {possible}, and at most half of them are drawn; ask "
            "for fewer or for more operations"
        )
    draw = random.Random(seed)
    seen: set[Chain] = set()
    while len(seen) < count:
        chain = _drawn(draw, num_calls)
        if chain not in seen:
            seen.add(chain)
            yield chain


def num_chains(num_calls: int) -> int:
    """How many chains of `num_calls` operations there are."""
    ways = [1] * (LARGEST + 1)
    for _ in range(num_calls):
        ways = [sum(ways[applied(number, *step)] for step in steps(number)) for number in range(LARGEST + 1)]
    return sum(ways[FIRST[0] : FIRST[1] + 1])


def steps(number: int) -> list[tuple[str, int]]:
    """The operations that lead from `number` to one from 0 to the largest."""
    operands = range(OPERAND[0], OPERAND[1] + 1)
    every = [(sign, operand) for sign in "+-*" for operand in operands]
    return [step for step in every if 0 <= applied(number, *step) <= LARGEST]


def _drawn(draw: random.Random, num_calls: int) -> Chain:
    first = number = draw.randint(*FIRST)
    operations = []
    for _ in range(num_calls):
        sign, operand = draw.choice(steps(number))
        operations.append(f"{sign}{operand}")
        number = applied(number, sign, operand)
    return Chain(first, tuple(operations))


def prompt(chain: Chain) -> str:
    """The request to work out a chain."""
    return f"Work out {chain.first} {' '.join(chain.operations)}"


def tagged(answer: int | str) -> str:
    """`answer` between the answer tags."""
    return f"{OPENING}{answer}{CLOSING}"


def is_right(reply: str, value: int) -> bool:
    """Whether the first tagged answer of a reply is `value`."""
    found = ANSWER.search(reply)
    return found is not None and found.group(1).strip() == str(value)


def progress(calls: Sequence[str], expected: Sequence[str]) -> int:
    """How many of the expected calls were made, in order; others between them do not count against it."""
    num_done = 0
    for call in calls:
        if num_done < len(expected) and "".join(call.split()) == expected[num_done]:
            num_done += 1
    return num_done
