"""What a judge is asked about a rollout, and how a score is read from its answer."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from configs.judges import PLACEHOLDERS, JudgeConfig, ParserConfig

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
SCORE = re.compile(rf"score\W*?[:=]\W*?({NUMBER})", re.IGNORECASE)
LAST_NUMBER = re.compile(rf"(?<![\w.])({NUMBER})")
PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
Row = Mapping[str, Any]


class NotJudgeable(ValueError):
    """A rollout lacks what the prompt of a judge names."""


def prompt_of(judge: JudgeConfig, trace: Row, messages: Sequence[Row], task: Row) -> str:
    """Return the prompt about a trace with its messages in order; `task` is that of its example.

    Raises NotJudgeable where the prompt names an answer that neither the trace's info nor the task has.
    """

    def text_of(match: re.Match[str]) -> str:
        match match[1]:
            case "rubric":
                return judge.rubric
            case "answer":
                return _answer(judge, trace, task)
            case "question":
                return next((_text(row) for row in messages if row["role"] == "user"), "")
            case "response":
                return next((_text(row) for row in reversed(messages) if row["sampled"]), "")
        return "\n\n".join(f"{row['role']}: {_text(row)}" for row in messages)

    # In one pass: braces in a reply are text, and name nothing.
    return PLACEHOLDER.sub(text_of, judge.prompt)


def read_score(text: str, parser: ParserConfig) -> float | None:
    """Return the score in the text of an answer; None where there is none, or it is out of bounds."""
    try:
        score = _read(text, parser)
    except (ValueError, TypeError, KeyError):
        return None
    in_bounds = score is not None and math.isfinite(score) and parser.minimum <= score <= parser.maximum
    return score if in_bounds else None


def _read(text: str, parser: ParserConfig) -> float | None:
    match parser.type:
        case "number":
            found = SCORE.findall(text) or LAST_NUMBER.findall(text)
        case "pattern":
            found = re.findall(parser.pattern, text)
        case "json":
            found = [json.loads(part)[parser.field] for part in re.findall(r"\{[^{}]*\}", text)[-1:]]
        case "choice":
            scores = {word.casefold(): score for word, score in parser.choices.items()}
            words = "|".join(map(re.escape, sorted(scores, key=len, reverse=True)))
            found = [scores[word] for word in re.findall(rf"(?<!\w)(?:{words})(?!\w)", text.casefold())]
    return float(found[-1]) if found else None


def _text(row: Row) -> str:
    return row["content"] or ""


def _answer(judge: JudgeConfig, trace: Row, task: Row) -> str:
    for fields in (json.loads(trace["info"] or "{}"), task):
        if (value := fields.get(judge.answer_field)) is not None:
            return value if isinstance(value, str) else json.dumps(value)
    raise NotJudgeable(
        f"judge {judge.name!r} is to be shown {{answer}}, and the tasks of environment {trace['environment']!r} have "
        f"no field {judge.answer_field!r}. Nothing was asked, the rollouts are safe: set judges...answer_field to one "
        f"of {', '.join(sorted(task))}, or take {{answer}} out of the prompt"
    )
