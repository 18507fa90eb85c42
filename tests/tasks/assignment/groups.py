"""Assignments and credited samples of groups, by hand."""

import pyarrow as pa

from storage.schemas.stage_tables import SAMPLES

STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights")


def assignments(*groups):
    """Two members of each group; a group is named after its environment and a number."""
    rows = [{"group_id": group, "environment": group[0]} for group in groups for _ in range(2)]
    return pa.Table.from_pylist(rows, schema=pa.schema([("group_id", pa.string()), ("environment", pa.string())]))


def credits(*samples):
    """Samples as group and weights in the rl component, or in the one named."""
    rows = []
    for group, weights, *stream in samples:
        row = dict.fromkeys(STREAMS, [0.0] * len(weights)) | {stream[0] if stream else "rl_weights": weights}
        rows.append({"group_id": group, **row})
    return pa.Table.from_pylist(rows, schema=pa.schema([SAMPLES.arrow.field(name) for name in ("group_id", *STREAMS)]))
