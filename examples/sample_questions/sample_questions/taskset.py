"""The taskset that verifiers loads under the id `sample_questions`."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

LETTERS = "ABCD"


class QuestionData(vf.TaskData):
    """One question."""

    passage: str
    """What only those see who argue."""
    question: str
    options: str
    """The options behind their letters."""
    answer: str
    """The letter of the right option."""
    claims: str
    """Two letters, one of them right: what the first and the second debater claim. A consultant claims the first."""


class QuestionTask(vf.Task[QuestionData]):
    """A question; what an episode is worth is the environment's to say."""

    @property
    def key(self) -> str:
        """The question and its options tell it from all others."""
        return f"{self.data.question} {self.data.options}"


class QuestionTaskset(vf.Taskset[QuestionTask, vf.TasksetConfig]):
    """The questions of `questions.jsonl`, which were written for this package."""

    def load(self) -> Iterator[QuestionTask]:
        """Yield one task for each question."""
        for data in questions():
            yield QuestionTask(data, self.config.task)


def questions() -> Iterator[QuestionData]:
    """Yield the questions; which wrong option is claimed, and by whom, is drawn by a hash of the question."""
    for line in Path(__file__).with_name("questions.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        options = " ".join(f"{letter} {text}" for letter, text in zip(LETTERS, row.pop("options"), strict=True))
        draw, answer = hashlib.sha256(row["question"].encode()).digest(), row["answer"]
        wrong = [letter for letter in LETTERS if letter != answer][draw[0] % 3]
        yield QuestionData(options=options, claims=wrong + answer if draw[1] % 2 else answer + wrong, **row)
