"""Constant lengths: the rl denominator of algorithms for which a rollout counts for the same however long it is."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from configs.run import of
from tasks.columns import texts
from tasks.ragged import Integers, Ragged
from tasks.samples import Samples


def by_constant_length(
    samples: Samples, updates: Sequence[Integers], traces: pa.Table, lengths: Mapping[str, int | None]
) -> Samples:
    """Return the samples with the rl weights of each update multiplied by N / D; `updates` are their samples.

    N is the number of the update's weighted rl tokens, the denominator that the learner divides by. D counts each trace
    with rl weight of an environment in `lengths` for its constant length, whatever number of samples it has, and of
    other environments each weighted token. So the loss is sum(w x) / D: with one constant L and n traces
    sum(w x) / (n L), as in Dr. GRPO (Liu et al. 2025, arXiv 2503.20783). A trace whose samples are in two updates
    counts in both.
    """
    counts_for = np.array([of(lengths, name) or 0 for name in texts(traces["environment"])], np.int64)
    row = Ragged(samples.streams["rl_weights"], samples.offsets).row_of_value
    num_weighted = np.bincount(row[samples.streams["rl_weights"] != 0], minlength=len(samples.ids))
    factor = np.ones(len(samples.ids))
    for members in updates:
        weighted = members[num_weighted[members] > 0]
        owner = samples.owner[weighted]
        denominator = num_weighted[weighted][counts_for[owner] == 0].sum() + counts_for[np.unique(owner)].sum()
        factor[members] = num_weighted[weighted].sum() / max(denominator, 1)
    scaled = (samples.streams["rl_weights"] * factor[row]).astype(np.float32)
    return replace(samples, streams=samples.streams | {"rl_weights": scaled})
