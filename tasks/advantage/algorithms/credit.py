"""What an algorithm is given and what it answers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.schemas.stage_tables import TRACES
from tasks.arrays.columns import texts
from tasks.arrays.ragged import Integers, Ragged

Weights = npt.NDArray[np.float32]
Scalars = npt.NDArray[np.float64]
SMALL = [name for name in TRACES.arrow.names if name not in ("record", "info", "error_message", "error_traceback")]
"""The columns of traces whose values are small."""


@dataclass(frozen=True)
class GroupedTraces:
    """The kept traces of a step with their messages; each message's tokens are there once, however many branches.

    An algorithm sees those of one environment.
    """

    traces: pa.Table
    messages: pa.Table
    owner: Integers
    """The trace row of each message; shape [messages]."""
    mask: Ragged
    """Per message: which of its tokens the policy sampled."""
    references: Ragged | None = None
    """Per message: log-prob of each sampled token under the reference, in nats; 0 on other tokens, NaN where the
    message was not scored; None where no reference was asked."""
    states: pa.Table | None = None
    """The estimator's rows of table `estimator_states` after the step before; None for the first step of a run."""
    counts: Integers | None = None
    """`num_sampled` where the messages are not there."""

    @cached_property
    def num_sampled(self) -> Integers:
        """Sampled tokens of each trace, those that branches share once; shape [traces]."""
        if self.counts is not None:
            return self.counts
        owner = self.owner[self.mask.row_of_value]
        return np.bincount(owner[self.mask.values], minlength=self.traces.num_rows)

    @classmethod
    def without_messages(cls, parts: "Iterable[GroupedTraces]") -> "GroupedTraces":
        """Return the traces of some parts, one after the other, with what they say without their messages."""
        traces, counts = zip(*((part.traces.select(SMALL), part.num_sampled) for part in parts), strict=True)
        none = Ragged.from_lengths(np.zeros(0, np.bool_), [])
        messages = pa.table({})
        return cls(pa.concat_tables(traces), messages, np.zeros(0, np.int64), none, counts=np.concatenate(counts))

    def copy(self) -> "GroupedTraces":
        """Return the same in arrays of its own, for whoever may write to them; tables cannot be written to."""
        references = self.references and self.references.copy()
        return replace(self, owner=self.owner.copy(), mask=self.mask.copy(), references=references)

    def of(self, environment: str) -> "GroupedTraces":
        """Return what belongs to one environment, in the same order."""
        traces = np.flatnonzero(np.array(texts(self.traces["environment"]), object) == environment)
        messages = np.flatnonzero(np.isin(self.owner, traces))
        states = self.states and self.states.filter(pc.field("environment") == environment)
        return GroupedTraces(
            self.traces.take(traces),
            self.messages.take(messages),
            np.searchsorted(traces, self.owner[messages]),  # rows rise, so the place of an old one is the new one
            self.mask.take(messages),
            self.references and self.references.take(messages),
            states,
            None if self.counts is None else self.counts[traces],
        )


@dataclass(frozen=True)
class Credit:
    """What every trace and every token of its messages is worth."""

    baseline: Scalars
    """Per trace: what was subtracted from its reward; NaN is none."""
    advantage: Scalars
    """Per trace; NaN is none."""
    rl: Weights
    """Per token of the messages, flat: weight in the rl component."""
    ce: Weights
    """The same for cross-entropy."""
    ref_kl: Weights
    """The same for reference KL."""
    signal: Weights | None = None
    """Per token: what the column `advantages` holds; None is the trace's advantage wherever there is rl weight."""
    states: pa.Table | None = None
    """The rows of table `estimator_states` after these traces, for the next step; None where there is no state."""
    zero_sum: bool = True
    """False where settings take it from an algorithm whose groups add up to zero otherwise."""

    @classmethod
    def none(cls, kept: GroupedTraces) -> "Credit":
        """Return the credit of traces that nothing is made of: no baseline, no advantage, and weight on no token."""
        missing = np.full(kept.traces.num_rows, np.nan)
        zero = np.zeros(len(kept.mask.values), np.float32)
        return cls(missing, missing.copy(), zero, zero.copy(), zero.copy())  # of its own each, to be written to

    @classmethod
    def of_advantages(cls, kept: GroupedTraces, baseline: Scalars, advantage: Scalars) -> "Credit":
        """Return rl weight 1 on every sampled token of the traces with an advantage; NaN is none, and no weight."""
        credited = ~np.isnan(advantage)[kept.owner[kept.mask.row_of_value]]
        weights = (kept.mask.values & credited).astype(np.float32)
        return replace(cls.none(kept), baseline=baseline, advantage=advantage, rl=weights)

    def signals(self, kept: GroupedTraces) -> Weights:
        """Return what the column `advantages` holds of every token, flat."""
        if self.signal is not None:
            return self.signal
        worth = np.nan_to_num(self.advantage)[kept.owner[kept.mask.row_of_value]].astype(np.float32)
        return np.where(self.rl != 0, worth, np.float32(0))


@dataclass(frozen=True)
class Algorithm:
    """A way to credit traces, and what must be true of the result."""

    credit: Callable[[GroupedTraces, Any], Credit]
    """Credits the kept traces of one environment under the algorithm's own config section."""
    zero_sum: bool
    """Whether the advantages of a group's kept traces add up to zero, unless a credit says otherwise."""
    sees: Literal["groups", "rewards", "all"] = "all"
    """What it has to be given at once: `groups` credits a group the same whatever others are there, states aside, which
    go from one to the next; `rewards` makes advantages of the traces and their `num_sampled`, of all of a batch, and
    Credit.of_advantages of them; `all` needs the whole, unless its section says `in_parts`."""


class AdvantageBreach(ValueError):
    """The rows that came in, or the advantages that came out, contradict what every algorithm relies on."""
