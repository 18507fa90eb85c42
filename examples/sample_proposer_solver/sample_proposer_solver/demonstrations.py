"""Demonstrations for a supervised warm start: problems set at random, and answers of which most are wrong."""

import random
from collections.abc import Iterator

from chat_loop.demonstrating import command, read

from sample_proposer_solver.sums import Problem, beginnings, proposed, question, request

Row = dict[str, list[dict[str, str]]]


def demonstrations(count: int, *, seed: int, largest: int, right: float = 0.5, invalid: float = 0.1) -> Iterator[Row]:
    """Yield `count` conversations of one turn, one in four of them the proposer's.

    A share `invalid` of the proposals is no problem that was asked for; a share `right` of the answers is right, and
    the others repeat the second number. Raises ValueError where a share is not from 0 to 1.
    """
    if not (0 <= right <= 1 and 0 <= invalid <= 1):
        raise ValueError(f"right {right} and invalid {invalid}: shares from 0 to 1")
    draw = random.Random(f"sums {seed}")
    starts = list(beginnings(largest))
    for number in range(count):
        start, second = draw.choice(starts), draw.randint(0, largest)
        if number % 4 == 0:
            broken = draw.random() < invalid
            yield _row(request(start, largest), start if broken else f"{second}")
        else:
            problem = proposed(f"{second}", start, largest)
            assert problem is not None, "the problem was made as asked"
            yield _row(question(problem), _answer(problem, draw, right))


def _answer(problem: Problem, draw: random.Random, right: float) -> str:
    return str(problem.answer if draw.random() < right else problem.second)


def _row(asked: str, reply: str) -> Row:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]}


def words(largest: int) -> list[str]:
    """What a small byte-level tokenizer shall keep whole: the fixed texts, and each number as one token."""
    fixed = ["Set ", f"? to {largest}", "user", "assistant", "\n\n"]
    return fixed + [str(number) for number in range(10, 2 * largest + 4)]


def main() -> None:
    """Run the command line."""
    parser = command(__doc__)
    parser.add_argument("--largest", type=int, default=9, help="the largest number in a problem, as in the run")
    parser.add_argument("--right", type=float, default=0.5, help="share of right answers")
    parser.add_argument("--invalid", type=float, default=0.1, help="share of proposals that are none")
    files, choices = read(parser)
    files.write(demonstrations(**choices), words(choices["largest"]))


if __name__ == "__main__":
    main()
