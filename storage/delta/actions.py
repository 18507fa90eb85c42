"""What Delta Lake is told: a table's properties, and of what a commit consists, files added and files taken out."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.transaction import AddAction, RemoveAction

from storage.delta.log import CHECKPOINT_INTERVAL
from storage.refs import File

PARTITION = "run"
PROPERTIES = {
    "delta.appendOnly": "true",
    "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
    "delta.dataSkippingStatsColumns": "step,attempt",
    "delta.enableExpiredLogCleanup": "false",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}
"""What every table is made with."""


@dataclass(frozen=True)
class Active:
    """One file that a table holds now: its path, size, run, and the least and greatest attempt in it."""

    path: str
    size: int
    run: str
    first_attempt: str
    last_attempt: str

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Active":
        """The file out of a row of Delta's list of additions; where attempts are not known, it may hold any."""
        first, last = row.get("min.attempt"), row.get("max.attempt")
        return cls(row["path"], row["size_bytes"], row["partition.run"], first or "", last or "\U0010ffff")


def addition(
    file: File, rows: pa.Table, partition: Mapping[str, str], statistics: Sequence[str], new: bool
) -> AddAction:
    """The addition of a file that holds `rows`, with bounds of the columns `statistics`; `new` unless it repeats."""
    bounds = {name: cast(Any, pc.min_max(rows[name])).as_py() for name in statistics}
    stats = {
        "numRecords": rows.num_rows,
        "minValues": {name: bound["min"] for name, bound in bounds.items()},
        "maxValues": {name: bound["max"] for name, bound in bounds.items()},
        "nullCount": {name: 0 for name in bounds},
    }
    return AddAction(file.path, file.size, dict(partition), int(time.time() * 1000), new, json.dumps(stats))


def removal(file: Active, partition: Mapping[str, str]) -> RemoveAction:
    """The removal of a file; not marked as a change of data, which Delta refuses in a table that only grows."""
    return RemoveAction(file.path, False, int(time.time() * 1000), file.size, dict(partition))


def new_paths(log: str) -> list[str]:
    """The paths of files with new rows that one version adds, out of its text; not of those that only repeat rows."""
    additions = [action["add"] for line in log.splitlines() if "add" in (action := json.loads(line))]
    return [each["path"] for each in additions if each["dataChange"]]


def last_number(logs: Sequence[str], application: str, before: int) -> int:
    """The number of an application id after these texts of log versions, oldest first; `before` where none names it."""
    found = [json.loads(line).get("txn") for log in logs for line in log.splitlines() if '"txn"' in line]
    return int(next((each["version"] for each in reversed(found) if each and each["appId"] == application), before))
