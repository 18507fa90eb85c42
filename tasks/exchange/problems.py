"""What is wrong with a file that is to be imported: every problem has a file, a line and a reason."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MOST_TOLD = 8
"""Problems that a message tells one by one; the others are counted."""


class Unfit(ValueError):
    """One rollout of a file cannot become rows; says why in a few words that are the same for all of its kind."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class ImportRefused(ValueError):
    """A file holds lines that cannot be imported, or nothing that can."""


@dataclass(frozen=True)
class Problem:
    """One line that cannot be imported."""

    file: str
    line: int
    """1-based; of a Parquet file, the row's number."""
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}{f': {self.detail}' if self.detail else ''}"


def counted(problems: Sequence[Problem]) -> dict[str, int]:
    """Return how many lines were left out for which reason, the most frequent first."""
    return dict(Counter(problem.reason for problem in problems).most_common())


def refusal(problems: Sequence[Problem]) -> ImportRefused:
    """Return the error that names the first problems and counts the rest."""
    told = [f"  {problem}" for problem in problems[:MOST_TOLD]]
    if len(problems) > MOST_TOLD:
        told.append(f"  and {len(problems) - MOST_TOLD} more")
    lines = "1 line cannot" if len(problems) == 1 else f"{len(problems)} lines cannot"
    return ImportRefused(
        "\n".join([f"{lines} be imported.", *told])
        + "\nNothing was written. Mend the file, or leave these lines out with --skip-bad."
    )
