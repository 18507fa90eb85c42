"""Repetition: a long run of tokens that the policy was nearly certain of; it is going round in a loop."""

from math import log

import numpy as np

from configs.filters import RepetitionFilter
from tasks.arrays.finding import FilterInput, Finding, Flags, hits_from
from tasks.arrays.ragged import Integers, Ragged


def repetition(material: FilterInput, settings: RepetitionFilter) -> Finding:
    """Hit every trace with a run of at least `window` sampled tokens of one message, each with a log-prob above log(p).

    The evidence is the longest run of the trace: its message, first position and length.
    """
    mask, logprobs = Ragged.of(material.messages["mask"]), Ragged.of(material.messages["logprobs"])
    near_certain = mask.values & (logprobs.values > log(settings.probability))
    start, length = runs(near_certain, mask.offsets)
    long = np.flatnonzero(length >= settings.window)
    by_length = long[np.argsort(length[long], kind="stable")]
    message = mask.row_of_value[start]
    # Shortest first, so that of the runs of a trace the longest is the one that stays.
    evidence = {
        int(material.owner[message[i]]): {
            "message": material.messages["message"][int(message[i])].as_py(),
            "position": int(start[i] - mask.offsets[message[i]]),
            "length": int(length[i]),
        }
        for i in by_length
    }
    return hits_from(evidence, material.traces.num_rows)


def runs(flags: Flags, offsets: Integers) -> tuple[Integers, Integers]:
    """Return first positions and lengths of the runs of true flags; a run ends where a row of `offsets` does."""
    opens, closes = flags.copy(), flags.copy()
    opens[1:] &= ~flags[:-1]
    closes[:-1] &= ~flags[1:]
    # At the borders of rows there is no neighbour: what came before is of another message.
    full = offsets[:-1][np.diff(offsets) > 0]
    opens[full] = flags[full]
    ends = offsets[1:][np.diff(offsets) > 0] - 1
    closes[ends] = flags[ends]
    start = np.flatnonzero(opens)
    return start, np.flatnonzero(closes) - start + 1
