"""Repetition: a long run of tokens that the policy was nearly certain of; it is going round in a loop."""

from math import log

import numpy as np

from configs.filters import RepetitionFilter
from tasks.arrays.finding import FilterInput, Finding, Flags, hits_from
from tasks.arrays.message_graph import find_branches
from tasks.arrays.ragged import Integers, Ragged, places


def repetition(material: FilterInput, settings: RepetitionFilter) -> Finding:
    """Hit every trace with a run of at least `window` sampled tokens, each with a log-prob above log(p).

    A run goes on from message to message of a branch: what was not sampled, such as the results of tools, neither ends
    it nor counts. The evidence is the longest run of the trace: message and position of its first token, and length.
    """
    mask, logprobs = Ragged.of(material.messages["mask"]), Ragged.of(material.messages["logprobs"])
    branches = find_branches(material.messages, material.owner)
    where, offsets = places(mask.offsets, branches.path.values)
    sampled = np.flatnonzero(mask.values[where])
    where = where[sampled]
    # Where each branch ends among its sampled tokens.
    ends = np.searchsorted(sampled, offsets[branches.path.offsets])
    start, length = runs(logprobs.values[where] > log(settings.probability), ends)
    long = np.flatnonzero(length >= settings.window)
    by_length = long[np.lexsort((long, length[long]))]
    first = where[start]
    message = mask.row_of_value[first]
    # Shortest first, so that of the runs of a trace the longest is the one that stays.
    evidence = {
        int(material.owner[message[i]]): {
            "message": material.messages["message"][int(message[i])].as_py(),
            "position": int(first[i] - mask.offsets[message[i]]),
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
