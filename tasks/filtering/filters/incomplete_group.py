"""Incomplete group: a member failed or was not scored, and scores of the others that depend on it mean nothing."""

import numpy as np
import pyarrow.compute as pc

from configs.filters import IncompleteGroupFilter
from tasks.arrays.columns import codes
from tasks.arrays.finding import FilterInput, Finding, hits_from


def incomplete_group(material: FilterInput, settings: IncompleteGroupFilter) -> Finding:
    """Hit the standing members of every group in which a trainable trace has an error or no reward.

    The evidence is how many of the group's trainable traces were scored, and how many there are. A member that another
    filter excludes was scored, so it leaves the group complete.
    """
    traces = material.traces
    trainable = traces["trainable"].to_numpy().astype(np.bool_)
    lost = pc.or_(pc.is_valid(traces["error_class"]), pc.is_null(traces["reward"])).to_numpy().astype(np.bool_)
    code, groups = codes(traces["group_id"])
    size = np.bincount(code[trainable], minlength=len(groups))
    scored = np.bincount(code[trainable & ~lost], minlength=len(groups))
    # Those that do not stand have a reason already, which this one would hide.
    evidence = {
        int(row): {"members": int(scored[code[row]]), "size": int(size[code[row]])}
        for row in np.flatnonzero(material.standing & (scored < size)[code])
    }
    return hits_from(evidence, traces.num_rows)
