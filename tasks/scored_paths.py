"""Scored paths: how the sampled tokens of message graphs are cut into sequences, each of them scored exactly once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.columns import FLOATS
from storage.schemas import REFERENCES
from tasks.branches import find_branches
from tasks.ragged import Integers, Ragged


@dataclass(frozen=True)
class ScoredPath:
    """A way through a message graph, from a root to the last message that no path before it scores."""

    trace: int
    """Row of its trace."""
    rows: list[int]
    """Rows of its messages, from the root on."""
    new: frozenset[int]
    """Those of them whose sampled tokens are scored on this path."""


class Scores:
    """Log-probs of the tokens of messages under a reference, laid down path by path."""

    def __init__(self, messages: pa.Table) -> None:
        self._messages = messages
        self._mask = Ragged.of(messages["mask"])
        self._tokens = Ragged.of(messages["token_ids"])
        self._values: npt.NDArray[np.float32] = np.zeros(len(self._mask.values), np.float32)
        self._sampled = np.zeros(messages.num_rows, np.bool_)
        self._sampled[self._mask.row_of_value[self._mask.values]] = True

    def paths(self, owner: Integers) -> Iterator[ScoredPath]:
        """Yield the paths on which every message with sampled tokens is scored once: on the first branch through it.

        `owner` is the trace row of each message; shape [messages].
        """
        branches = find_branches(self._messages, owner)
        waiting = self._sampled.copy()
        for branch, trace in enumerate(branches.owner.tolist()):
            path = branches.path.values[branches.path.offsets[branch] : branches.path.offsets[branch + 1]].tolist()
            if new := [row for row in path if waiting[row]]:
                waiting[new] = False
                yield ScoredPath(trace, path[: path.index(new[-1]) + 1], frozenset(new))

    def tokens(self, path: ScoredPath) -> list[int]:
        """Return the token ids along a path."""
        found: list[int] = self._tokens.take(path.rows).values.tolist()
        return found

    def begins_sampled(self, path: ScoredPath) -> bool:
        """Tell whether the first token of a path was sampled, which nothing goes before that it could be given."""
        return bool(self._mask.take(path.rows).values[:1].any())

    def lay(self, path: ScoredPath, logprobs: Sequence[float]) -> None:
        """Keep the log-probs of a path's tokens, one for each, for the messages that are scored on it."""
        begin = 0
        for row in path.rows:
            place = slice(*self._mask.offsets[row : row + 2])
            end = begin + place.stop - place.start
            if row in path.new:
                self._values[place] = logprobs[begin:end]
            begin = end
        assert begin == len(logprobs), f"{len(logprobs)} log-probs for a path of {begin} tokens"

    def rows(self) -> pa.Table:
        """Return the rows of references: one for each message with sampled tokens; other tokens have 0."""
        chosen = np.flatnonzero(self._sampled)
        values = np.where(self._mask.values, self._values, np.float32(0))
        taken = self._messages.select(["trace_id", "message"]).take(chosen)
        logprobs = Ragged(values, self._mask.offsets).take(chosen).arrow(FLOATS)
        return pa.table([*taken.columns, logprobs], schema=REFERENCES.arrow)
