"""Problems, how replies are read, and what they are worth: plain functions that need only the standard library."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

NUMBER = r"(0|[1-9]\d*)"
PROBLEM = re.compile(NUMBER + r"([+-])" + NUMBER, re.ASCII)


@dataclass(frozen=True)
class Problem:
    """Two numbers to add, or the second to take from the first."""

    first: int
    operator: str
    second: int

    @property
    def text(self) -> str:
        """The problem as it is written: `7+5`."""
        return f"{self.first}{self.operator}{self.second}"

    @property
    def answer(self) -> int:
        """The one right answer; it may be negative."""
        return self.first + self.second if self.operator == "+" else self.first - self.second


def beginnings(largest: int) -> Iterator[str]:
    """Yield what problems may begin with, `0+` to `largest`, and with a minus: each is asked for by itself."""
    for operator in "+-":
        yield from (f"{first}{operator}" for first in range(largest + 1))


def request(beginning: str, largest: int) -> str:
    """What the proposer is asked: to complete a problem that begins so, by a number up to the largest."""
    return f"Set {beginning}? to {largest}"


def question(problem: Problem) -> str:
    """What a solver is asked."""
    return f"{problem.text}="


def problem_of(text: str) -> Problem | None:
    """The problem that a text is, as `Problem.text` writes it; None where it is none."""
    found = PROBLEM.fullmatch(text)
    return Problem(int(found[1]), found[2], int(found[3])) if found else None


def proposed(reply: str, beginning: str, largest: int) -> Problem | None:
    """The problem that a reply completes, or None where it is not one number that is allowed."""
    said = reply.strip()
    if len(said) > len(str(largest)):
        return None
    problem = problem_of(beginning + said)
    return problem if problem is not None and problem.second <= largest else None


def is_right(reply: str, problem: Problem) -> bool:
    """Whether a reply is the answer: the number alone, without leading zeros."""
    return reply.strip() == str(problem.answer)


def difficulty(num_right: int, num_solvers: int) -> float:
    """Return 1 - 2 |p - 1/2|, where p is the share of solvers that were right: 1 where half were, 0 where all or none.

    A solver learns most from problems that it solves half of the time. The same reward is given to the challenger of
    R-Zero (arXiv 2508.05004), where p is the agreement of the solvers and no right answer is known.
    """
    return 1.0 - abs(2.0 * num_right / num_solvers - 1.0)
