"""JudgeAnswers: what judges answered, so that no question of a store is asked, and paid for, twice.

Answers are rows of the system table `judge_answers`, which count as soon as they are committed: before the stage that
asked has ended, and for every run of the store.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage.commits import GroupCommitter
from storage.records import CachedTable
from storage.schemas.system_tables import JUDGE_ANSWERS

LINGER_SECONDS = 0.1
"""How long a first answer waits for others that then share its commit."""
PAUSE_RATIO = 1.0
"""Pause after a commit, in durations of that commit."""
APPROVAL = "approval"
"""In place of a question: a person allowed the budget once more, which has no answer."""
SPENT = ("input_tokens", "output_tokens", "cost")
"""The columns that are summed."""


@dataclass(frozen=True)
class JudgeAnswer:
    """One answer of a judge; the columns of the table."""

    run: str
    step: int
    judge: str
    question: str
    """Digest of what was asked."""
    response: str
    """The answer as it came, in JSON."""
    input_tokens: int
    output_tokens: int
    cost: float
    seconds: float
    at: datetime

    @property
    def text(self) -> str:
        """The text of the answer; empty where the response has none."""
        match json.loads(self.response):
            case {"choices": [{"message": {"content": str(text)}}, *_]}:
                return text
        return ""


@dataclass
class Spent:
    """What a run has spent on a judge."""

    calls: int = 0
    tokens: int = 0
    cost: float = 0.0
    approvals: int = 0
    """How many times a person allowed the budget once more."""

    def add(self, input_tokens: int, output_tokens: int, cost: float) -> None:
        """Count an answer."""
        self.calls += 1
        self.tokens += input_tokens + output_tokens
        self.cost += cost


class AnswerTable(CachedTable):
    """The table of answers. In memory are the questions of each file alone: texts may be larger than memory."""

    contract = JUDGE_ANSWERS
    record_type = JudgeAnswer

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._questions: dict[str, frozenset[str]] = {}
        """By file."""

    def find(self, questions: Collection[str]) -> list[JudgeAnswer]:
        """Return all answers to some questions, of all runs, in order of time."""
        self.table.refresh()
        files = [file for file in self.table.active_files() if not self._of(file).isdisjoint(questions)]
        chosen = pc.field("question").isin(pa.array(sorted(questions), pa.string()))
        rows = self.table.dataset(files).to_table(filter=chosen).to_pylist()
        return sorted((JudgeAnswer(**row) for row in rows), key=lambda answer: answer.at)

    def spent(self, run: str) -> dict[str, Spent]:
        """Return what a run has spent, by judge."""
        self.table.refresh()
        rows = self.table.dataset(self.table.active_files(run)).to_table(["judge", "question", *SPENT]).to_pylist()
        total: dict[str, Spent] = {}
        for row in rows:
            spent = total.setdefault(row.pop("judge"), Spent())
            if row.pop("question") == APPROVAL:
                spent.approvals += 1
            else:
                spent.add(**row)
        return total

    def _of(self, file: Any) -> frozenset[str]:
        if file.path not in self._questions:
            rows = self.table.dataset([file]).to_table(["question"])
            self._questions[file.path] = frozenset(str(question) for question in rows["question"].to_pylist())
        return self._questions[file.path]


class JudgeAnswers(GroupCommitter[JudgeAnswer]):
    """Commits the answers of one run as they come, each durable within about LINGER_SECONDS; a context."""

    def __init__(self, table: AnswerTable) -> None:
        super().__init__("judge answers", LINGER_SECONDS, PAUSE_RATIO)
        self.table = table

    def __enter__(self) -> "JudgeAnswers":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            self.stop()

    def _commit(self, items: Sequence[JudgeAnswer]) -> None:
        self.table.add_records(items)
