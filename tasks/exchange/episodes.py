"""Describes an episode read from a file on its way to rows, and what can be wrong with a line."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Render = Callable[..., list[Row]]
"""Turns messages, and `tools` where there are some, into rows of tokens, one for each message."""

SAMPLED, GIVEN, RENDERED = "sampled", "given", "rendered"
"""Where tokens come from: a policy sampled them, with log-probs; the file has ids alone; the renderer made them."""
UNKNOWN_POLICY = "imported"
"""The policy key of traces with log-probs of a policy that is not in the store."""
TRAIN = "train"
"""The split of examples that may be trained on."""
NO_POLICY = ""
"""The policy key of traces whose tokens no policy is known to have sampled: they cannot be in an rl loss."""


@dataclass(frozen=True)
class Origin:
    """Where an episode was read."""

    file: str
    number: int
    """The file's place among those given; 0-based."""
    line: int
    """1-based."""


@dataclass(frozen=True)
class ImportContext:
    """How files are read: what of the command line may change rows, and what turns text into tokens."""

    environment: str = ""
    """The environment that all rollouts belong to; empty takes each one's own."""
    vocab_size: int = 0
    """Token ids are below this; 0 does not look."""
    render: Render | None = None
    """None where no model was named: rollouts without token ids are then refused."""


@dataclass
class Episode:
    """One episode: its traces and messages as rows, without the columns that its assignment decides."""

    origin: Origin
    episode_id: str
    environment: str
    example_id: str
    task: str
    """The task's data as JSON, as the examples table has it."""
    group: str | None
    """The file's own name for the group; None where it names none."""
    step: int | None
    """The training step that the file names; None where it names none."""
    traces: list[Row]
    messages: list[Row]
    split: str = TRAIN
    assignment: Row | None = None
    """The assignment's row, once it is known to which step and group the episode goes."""
    seed: int = 0


def compact(value: Any) -> str:
    """Return JSON with its keys in their own order and no spaces, which can be written as UTF-8.

    Half of a surrogate pair stays an escape, and so does then all that is not ASCII: a record of the store may hold it.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    # Tables and files are UTF-8, in which half of a pair cannot be written.
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def digest(*parts: str) -> str:
    """Return 24 hex characters that name the parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def first(*values: Any) -> Any:
    """Return the first value that is not None; None where all are."""
    return next((value for value in values if value is not None), None)


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a JSON object, or an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


LARGEST_STEP = 10**6


def checked_number(value: Any, name: str, least: float, most: float) -> float:
    """Return a number of a line; raise Unfit where it is none, or is not between `least` and `most`, as NaN is not."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= most:
        raise Unfit("a number is out of range", f"{name}: {str(value)[:40]} is not between {least:g} and {most:g}")
    return float(value)


def paths(parents: Sequence[int | None]) -> list[list[int]]:
    """Return the root-to-leaf paths of a graph in which every node comes after its parent, leaves in node order."""
    inner = {parent for parent in parents if parent is not None}
    found = []
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path, node = [leaf], parents[leaf]
        while node is not None:
            path.append(node)
            node = parents[node]
        found.append(path[::-1])
    return found


MOST_NAMED_LINES = 8
"""Problems that a message names one by one; the others are counted."""


class Unfit(ValueError):
    """One rollout of a file cannot become rows; says why in a few words that are the same for all of its kind."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class ImportRefused(ValueError):
    """A file holds lines that cannot be imported, or nothing that can."""


@dataclass(frozen=True)
class LineProblem:
    """One line that cannot be imported."""

    file: str
    line: int
    """1-based."""
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}{f': {self.detail}' if self.detail else ''}"


def count_reasons(problems: Sequence[LineProblem]) -> dict[str, int]:
    """Return how many lines were left out for which reason, the most frequent first."""
    return dict(Counter(problem.reason for problem in problems).most_common())


def refusal(problems: Sequence[LineProblem]) -> ImportRefused:
    """Return the error that names the first problems and counts the rest."""
    details = [f"  {problem}" for problem in problems[:MOST_NAMED_LINES]]
    if len(problems) > MOST_NAMED_LINES:
        details.append(f"  and {len(problems) - MOST_NAMED_LINES} more")
    lines = "1 line cannot" if len(problems) == 1 else f"{len(problems)} lines cannot"
    advice = "Nothing was written. Mend the file, or leave these lines out with --skip-bad."
    return ImportRefused("\n".join([f"{lines} be imported.", *details, advice]))
