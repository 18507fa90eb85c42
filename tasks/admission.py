"""Admission: what may not be trained on, whatever an algorithm makes of it.

These are turns that the environment could not read, and groups that the run's gate on advantages refuses.
"""

from dataclasses import replace

import numpy as np

from configs.sections import AdmissionConfig
from tasks.algorithms import Credit, Kept
from tasks.columns import codes
from tasks.parse_errors import Flags, require_known, unreadable
from tasks.ragged import Ragged

ROUNDING = 1e-9
"""An advantage this close to the refused range counts as within: a mean of equal rewards is not always exact."""
SINGLE = 2.0**-23
"""The same, as a share of an end of the range: advantages of tokens are stored in single precision."""


def without_unreadable(kept: Kept) -> tuple[Kept, Flags]:
    """Return the same with no token of an unreadable turn marked as sampled, and per token whether it is of one.

    The tokens stay where they are, as context of the turns after them. Raises StrangeFlag where a trace flags a message
    that it does not have.
    """
    require_known(kept.traces, kept.messages, kept.owner)
    mute = unreadable(kept.traces, kept.messages, kept.owner)[kept.mask.row_of_value]
    return replace(kept, mask=Ragged(kept.mask.values & ~mute, kept.mask.offsets)), mute


def refused(kept: Kept, credit: Credit, settings: AdmissionConfig) -> Flags:
    """Return, per token, whether its group is refused: all its rl tokens have advantages within the range.

    A group without rl tokens is not.
    """
    group_of_trace, groups = codes(kept.traces["group_id"])
    group = group_of_trace[kept.owner[kept.mask.row_of_value]]
    worth = credit.signals(kept).astype(np.float64)
    rl = credit.rl != 0
    lowest, highest = (end + sign * _slack(end) for end, sign in ((settings.reject_min, -1), (settings.reject_max, 1)))
    apart = (worth < lowest) | (worth > highest)
    weighed, telling = (np.bincount(group, flags, len(groups)) for flags in (rl, rl & apart))
    found: Flags = ((weighed > 0) & (telling == 0))[group]
    return found


def _slack(end: float) -> float:
    return ROUNDING + SINGLE * abs(end)


def silenced(kept: Kept, credit: Credit, tokens: Flags) -> Credit:
    """Return the credit without weight on some tokens; what their traces would have been worth stays to be read."""
    if not tokens.any():
        return credit
    rl, ce, ref_kl, signal = (
        np.where(tokens, np.float32(0), stream)
        for stream in (credit.rl, credit.ce, credit.ref_kl, credit.signals(kept))
    )
    return replace(credit, rl=rl, ce=ce, ref_kl=ref_kl, signal=signal)
