"""What an algorithm is given and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tasks.ragged import Integers, Ragged

Weights = npt.NDArray[np.float32]
Scalars = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Kept:
    """The kept traces of a step with their messages; each message's tokens are there once, however many branches."""

    traces: pa.Table
    messages: pa.Table
    owner: Integers
    """The trace row of each message; shape [messages]."""
    mask: Ragged
    """Per message: which of its tokens the policy sampled."""


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


@dataclass(frozen=True)
class Algorithm:
    """A way to credit traces, and what must be true of the result."""

    credit: Callable[[Kept, Any], Credit]
    """Credits the kept traces under the algorithm's own config section."""
    zero_sum: bool
    """Whether the advantages of a group's kept traces add up to zero."""


class AdvantageBreach(ValueError):
    """The rows that came in, or the advantages that came out, contradict what every algorithm relies on."""
