"""What a filter is given and what it answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tasks.arrays.ragged import Integers

Flags = npt.NDArray[np.bool_]
QUARANTINED = "quarantined"
"""The reason of a verdict on a rollout that was found to be unfit after it was made; no filter finds that."""
UNTRAINABLE = "untrainable"
"""The reason of a verdict on a trace that has no tokens of the policy."""
NO_TURNS = "no_turns"
"""What is found on a scored trace of a seat in which the policy was never asked; the reason is UNTRAINABLE."""


@dataclass(frozen=True)
class FilterInput:
    """The rows that filters look at."""

    traces: pa.Table
    messages: pa.Table
    owner: Integers
    """The trace row of each message; shape [messages]."""
    vocab_size: int
    standing: Flags
    """Per trace: trainable and, when a filter of groups looks, not yet excluded by any other enforcing filter."""
    learns_from_equals: Mapping[str, bool | None] = field(default_factory=dict)
    """By environment, see `configs.run.of`: whether its algorithm learns from a group of equal rewards."""
    episode_agents: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    """By environment: the agents that are compared within an episode, in place of the group."""


@dataclass(frozen=True)
class Finding:
    """Which traces a filter found something on, and the numbers that say so."""

    hits: Flags
    """Per trace; shape [traces]."""
    evidence: Mapping[int, Mapping[str, Any]]
    """Per trace row that was hit: numbers and names, fit for JSON."""


@dataclass(frozen=True)
class Filter:
    """A detector; whether to act on what it finds is the config's choice."""

    detect: Callable[[FilterInput, Any], Finding]
    """Looks at the rows with the filter's own config section."""
    of_groups: bool = False
    """Compares the members of a group, so it looks after all filters of single traces have excluded theirs."""


def hits_from(evidence: Mapping[int, Mapping[str, Any]], num_traces: int) -> Finding:
    """Return the finding that hits exactly the traces with evidence."""
    hits = np.zeros(num_traces, np.bool_)
    hits[list(evidence)] = True
    return Finding(hits, evidence)
