"""Parse error: a turn that the environment could not read.

Whatever this filter does with the rest of the rollout, such a turn is not trained on, see `tasks.advantage.stage`.
"""

import numpy as np

from configs.filters import ParseErrorFilter
from tasks.arrays.finding import FilterInput, Finding, hits_from
from tasks.arrays.parse_errors import parse_error_flags
from tasks.arrays.ragged import Ragged


def parse_error(material: FilterInput, settings: ParseErrorFilter) -> Finding:
    """Hit every trace with a sampled message that is flagged; the evidence is their numbers and tokens."""
    rows = np.flatnonzero(parse_error_flags(material.traces, material.messages, material.owner))
    # Messages may lie in any order; split below wants those of a trace together.
    rows = rows[np.argsort(material.owner[rows], kind="stable")]
    traces, first = np.unique(material.owner[rows], return_index=True)
    numbers = material.messages["message"].to_numpy()
    sampled = Ragged.of(material.messages["mask"])
    found = {
        int(trace): {"messages": numbers[own].tolist(), "tokens": int(sampled.take(own).values.sum())}
        for trace, own in zip(traces, np.split(rows, first[1:]), strict=False)
    }
    return hits_from(found, material.traces.num_rows)
