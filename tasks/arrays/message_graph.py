"""Message graphs of traces: their branches, each one training sample, and the removal of rejected attempts."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import rows_with, texts
from tasks.arrays.ragged import Integers, Ragged, lists


class BrokenGraph(ValueError):
    """A row names a trace that is not there, or a message is there twice or names a parent that does not precede it."""


@dataclass(frozen=True)
class Branches:
    """All branches of some traces, in order of trace, then of leaf."""

    owner: Integers
    """The trace row of each branch; shape [branches]."""
    number: Integers
    """The branch's number within its trace; shape [branches]."""
    path: Ragged
    """Per branch: rows of the messages table from root to leaf."""

    @property
    def first(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Per element of the paths: whether this branch is the first of all that has that message."""
        _, places = np.unique(self.path.values, return_index=True)
        first = np.zeros(len(self.path.values), np.bool_)
        first[places] = True
        return first


def owners(rows: pa.Table, traces: pa.Table, table: str) -> Integers:
    """Return, for each row of `table`, the row of its trace in `traces`; raise BrokenGraph if there is none."""
    found = pc.index_in(rows["trace_id"], value_set=traces["trace_id"].combine_chunks())
    if found.null_count:
        orphan = rows["trace_id"][pc.index(pc.is_null(found), True).as_py()]
        raise BrokenGraph(
            f"table {table}, column trace_id: {orphan} is not in table traces. Rows of two attempts may be mixed; "
            "nothing was trained. Run the stage that wrote the table again."
        )
    owner: Integers = found.to_numpy().astype(np.int64)
    return owner


def find_branches(messages: pa.Table, owner: Integers) -> Branches:
    """Return the branches of the messages, whose traces are given by `owner`; shape [messages].

    Raises BrokenGraph if a message is there twice, or if a parent is missing or its number is not below its child's,
    which also rules out cycles.
    """
    numbers, parents = messages["message"].to_pylist(), messages["parent"].to_pylist()
    row_of = {(trace, number): row for row, (trace, number) in enumerate(zip(owner.tolist(), numbers, strict=True))}
    if len(row_of) < messages.num_rows:
        raise BrokenGraph(
            f"table messages, column message: {messages.num_rows - len(row_of)} messages are there twice. Nothing was "
            "trained on them. Rows of two attempts may be mixed; run the rollout stage again."
        )
    above: list[int | None] = []
    for row, (trace, parent) in enumerate(zip(owner.tolist(), parents, strict=True)):
        if parent is not None and (parent >= numbers[row] or (trace, parent) not in row_of):
            raise BrokenGraph(
                f"table messages, column parent: message {numbers[row]} of trace {messages['trace_id'][row]} names "
                f"parent {parent}, which is not an earlier message of that trace. Nothing was trained on it. "
                "Run the rollout stage again."
            )
        above.append(None if parent is None else row_of[trace, parent])
    inner = {row for row in above if row is not None}
    leaves = sorted((trace, number) for (trace, number), row in row_of.items() if row not in inner)
    owners = np.array([trace for trace, _ in leaves], np.int64)
    # Leaves are sorted by trace: the first place of a trace is where its branches begin to count.
    starts = np.searchsorted(owners, owners)
    return Branches(owners, np.arange(len(leaves)) - starts, lists([_path(row_of[leaf], above) for leaf in leaves]))


def _path(leaf: int, above: list[int | None]) -> list[int]:
    path = [leaf]
    while (parent := above[path[-1]]) is not None:
        path.append(parent)
    return path[::-1]


ATTEMPT, ACCEPTED = "compaction_attempt", "compaction"
"""Types of links in a trace's record: to a request for a summary, and from a summary to the request that uses it."""

Row = dict[str, Any]


def drop_rejected(traces: pa.Table, messages: pa.Table) -> pa.Table:
    """Return the messages, in order, without rejected attempts and the prompts that only these answered.

    Turns before an attempt stay: they led to the reward. A trace's first message stays where no other would.
    """
    # A search for the word first: records are long JSON, and only few of them speak of attempts.
    marked = traces.filter(pc.match_substring(traces["record"], ATTEMPT)).select(["trace_id", "record"])
    if not marked.num_rows:
        return messages
    rows: dict[str, list[Row]] = {name: [] for name in texts(marked["trace_id"])}
    own = rows_with(messages, "trace_id", marked["trace_id"])
    for row in own.select(["trace_id", "message", "parent", "sampled"]).to_pylist():
        rows[row["trace_id"]].append(row)
    rejected = {
        (trace["trace_id"], number)
        for trace in marked.to_pylist()
        for number in _rejected_messages(_rejected_attempts(json.loads(trace["record"])), rows[trace["trace_id"]])
    }
    names = zip(texts(messages["trace_id"]), messages["message"].to_pylist(), strict=True)
    return messages.filter(pa.array([name not in rejected for name in names], pa.bool_()))


def _rejected_attempts(record: Row) -> set[int]:
    """Return the numbers of the messages of a trace that are attempts whose result was not used."""
    links = [node.get("semantic_parents") or () for node in record.get("nodes", ())]
    accepted = {link["node"] for each in links for link in each if link["type"] == ACCEPTED}
    tried = {number for number, each in enumerate(links) if any(link["type"] == ATTEMPT for link in each)}
    return tried - accepted


def _rejected_messages(attempts: set[int], rows: Sequence[Row]) -> set[int]:
    """Return the messages of a trace to remove: attempts that are leaves, and messages that lead to nothing else."""
    children = Counter(row["parent"] for row in rows)
    found, above = set[int](), set[int | None]()
    # From the leaves up: a message whose children are all removed is a leaf once its turn comes.
    for row in sorted(rows, key=lambda row: row["message"], reverse=True):
        number = row["message"]
        if not children[number] and (number in attempts or (number in above and not row["sampled"])):
            found.add(number)
            above.add(row["parent"])
            children[row["parent"]] -= 1
    return found if len(found) < len(rows) else found - {min(found)}
