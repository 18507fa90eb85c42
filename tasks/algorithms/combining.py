"""Combining: every environment's kept traces credited by its own algorithm, and laid together again."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from configs.algorithms import AlgorithmConfig
from tasks.algorithms.credit import Credit, Kept
from tasks.columns import texts

Credited = Callable[[Kept, AlgorithmConfig], Credit]
"""Credits the kept traces of one environment."""


def by_environment(kept: Kept, algorithm_of: Callable[[str], AlgorithmConfig], credited: Credited) -> Credit:
    """Return the credit of all kept traces, in their order, each environment's by its own algorithm.

    States are those of the environments whose algorithm has any; what one without kept traces had stays as it was.
    """
    environment = np.array(texts(kept.traces["environment"]), object)
    names = list(dict.fromkeys(environment))
    if len(names) == 1 and kept.states is None:
        return credited(kept, algorithm_of(names[0]))
    whole = _blank(kept)
    seen = [] if kept.states is None else list(dict.fromkeys(texts(kept.states["environment"])))
    states = {name: kept.of(name).states for name in seen}
    for name in names:
        part = credited(kept.of(name), algorithm_of(name))
        of_trace = environment == name
        of_token = of_trace[kept.owner[kept.mask.row_of_value]]
        whole.baseline[of_trace], whole.advantage[of_trace] = part.baseline, part.advantage
        whole.rl[of_token], whole.ce[of_token], whole.ref_kl[of_token] = part.rl, part.ce, part.ref_kl
        assert whole.signal is not None
        whole.signal[of_token] = part.signals(kept.of(name))
        states[name] = part.states
    found = [each for each in states.values() if each is not None]
    return Credit(**(vars(whole) | {"states": pa.concat_tables(found) if found else kept.states and kept.states[:0]}))


def _blank(kept: Kept) -> Credit:
    none = np.full(kept.traces.num_rows, np.nan)
    zero = np.zeros(len(kept.mask.values), np.float32)
    return Credit(none, none.copy(), zero, zero.copy(), zero.copy(), zero.copy())
