"""Noisy demonstrations for a supervised warm start: members that know the forms and little else."""

import random
import re
from collections.abc import Iterator

from chat_loop.demonstrating import command, read
from sample_arena.folding import SEPARATOR

from sample_questions.taskset import LETTERS, QuestionData, questions

MODES = {"answer": ("answerer",), "debate": ("first", "second", "judge"), "consultancy": ("consultant", "judge")}
"""The members of each way to play, who decides last."""
Row = dict[str, list[dict[str, str]]]


def demonstrations(count: int, *, seed: int, mode: str = "answer", right: float = 0.4) -> Iterator[Row]:
    """Yield `count` conversations, each one member's; those of an episode follow one another.

    Who argues cites the passage with probability `right`, and says `hm` otherwise. An answerer is right with this
    probability. A judge believes the only one who cites the passage. Otherwise it draws among the claims of a debate,
    and among all options where a consultant alone speaks, who would learn nothing from a judge that believes it.
    """
    draw, pool = random.Random(f"questions {seed}"), list(questions())
    rows = (row for _ in range(count) for row in _episode(draw.choice(pool), draw, MODES[mode], right))
    yield from (row for row, _ in zip(rows, range(count), strict=False))


def _episode(data: QuestionData, draw: random.Random, members: tuple[str, ...], right: float) -> list[Row]:
    arguing = members[:-1]
    question, heard, cited, rows = f"{data.question} {data.options}", list[str](), list[str](), list[Row]()
    for member, claim in zip(arguing, data.claims, strict=False):
        cites = draw.random() < right
        cited += [claim] * cites
        said = f"<{claim}> {data.passage}" if cites else f"<{claim}> hm"
        heard.append(f"{member}: {said}")
        rows.append(_row([f"{data.passage} {question} claim {claim}", "argue"], said))
    letters = list(data.claims if len(arguing) > 1 else LETTERS)
    letter = cited[0] if len(cited) == 1 else draw.choice(letters)
    if not arguing and draw.random() < right:
        letter = data.answer
    opening = question if arguing else f"{data.passage} {question}"
    return [*rows, _row([opening, *heard, "decide"], f"<{letter}>")]


def _row(read: list[str], said: str) -> Row:
    texts = {"user": SEPARATOR.join(read), "assistant": said}
    return {"messages": [{"role": role, "content": text} for role, text in texts.items()]}


def words() -> list[str]:
    """Return what a small byte-level tokenizer shall keep whole."""
    texts = " ".join(f"{data.passage} {data.question} {data.options}" for data in questions())
    forms = [f"<{letter}>" for letter in LETTERS] + [f"{member}: " for members in MODES.values() for member in members]
    return list(dict.fromkeys([*forms, *re.findall(" ?[A-Za-z]{4,}", texts), " claim", "argue", "decide", " hm"]))


def main() -> None:
    """Run the command line."""
    parser = command(__doc__, count=4800)
    parser.add_argument("--mode", choices=list(MODES), default="answer", help="the way that questions are played")
    parser.add_argument("--right", type=float, default=0.4, help="share of right answers, or of arguments that cite")
    files, choices = read(parser)
    files.write(demonstrations(**choices), words())


if __name__ == "__main__":
    main()
