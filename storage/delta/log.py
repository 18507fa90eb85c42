"""The log of a Delta table: the actions that a commit consists of, the texts of its versions, pruning and torn files.

Each version is a file of JSON lines, one action a line; every tenth has a checkpoint beside it, a Parquet file with all
that the table holds at that version.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake.transaction import AddAction, RemoveAction

from storage.delta.parquet import buffer_reader
from storage.errors import StoreUnavailable, border
from storage.refs import File
from storage.roots import Root

PARTITION = "run"
CHECKPOINT_INTERVAL = 10
"""Versions from one checkpoint to the next: what opening and committing cost grows with the commits since the last."""
PROPERTIES = {
    # No other program may rewrite rows that the ledger names by their digest.
    "delta.appendOnly": "true",
    "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
    "delta.dataSkippingStatsColumns": "step,attempt",
    "delta.enableExpiredLogCleanup": "false",  # `prune_log` does it, when no reader can be surprised
    "delta.deletedFileRetentionDuration": "interval 7 days",
}
"""What every table is made with."""
TORN = ".torn"
CHECKPOINT = ".checkpoint.parquet"
CACHED_VERSIONS = 64
"""Versions of the log whose texts stay in memory once read."""
# A loss of power may tear the newest: the table then opens from the one before it.
RETAINED_CHECKPOINTS = 2
RETAINED_MINUTES = 1


@dataclass(frozen=True)
class ActiveFile:
    """One file that a table holds now: its path, size, run, and the least and greatest attempt in it."""

    path: str
    size: int
    run: str
    first_attempt: str
    last_attempt: str

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "ActiveFile":
        """The file out of a row of Delta's list of additions; where attempts are not known, it may hold any."""
        first, last = row.get("min.attempt"), row.get("max.attempt")
        # The last character there is: greater than every attempt.
        return cls(row["path"], row["size_bytes"], row["partition.run"], first or "", last or "\U0010ffff")


def addition(
    file: File, rows: pa.Table, partition: Mapping[str, str], statistics: Sequence[str], new: bool
) -> AddAction:
    """The action that adds a file with `rows` to a table; `new` is False where they only replace rows that it holds.

    `statistics` names the columns whose bounds go into the log, where readers find them without opening the file.
    """
    bounds = {name: cast(Any, pc.min_max(rows[name])).as_py() for name in statistics}
    stats = {
        "numRecords": rows.num_rows,
        "minValues": {name: bound["min"] for name, bound in bounds.items()},
        "maxValues": {name: bound["max"] for name, bound in bounds.items()},
        "nullCount": {name: 0 for name in bounds},
    }
    return AddAction(file.path, file.size, dict(partition), int(time.time() * 1000), new, json.dumps(stats))


def removal(file: ActiveFile, partition: Mapping[str, str]) -> RemoveAction:
    """The action that removes a file. Not marked as a change of data, which Delta refuses in an append-only table."""
    return RemoveAction(file.path, False, int(time.time() * 1000), file.size, dict(partition))


def new_paths(log: str) -> list[str]:
    """The paths of files with new rows that one version adds, out of its text; not of those that replace others."""
    additions = [action["add"] for line in log.splitlines() if "add" in (action := json.loads(line))]
    return [each["path"] for each in additions if each["dataChange"]]


def last_number(logs: Sequence[str], application: str, before: int) -> int:
    """The number of an application id after these texts of log versions, oldest first; `before` where none names it."""
    # Looked for as text first: to parse every line of the log is what would cost.
    found = [json.loads(line).get("txn") for log in logs for line in log.splitlines() if '"txn"' in line]
    return int(next((each["version"] for each in reversed(found) if each and each["appId"] == application), before))


class LogTexts:
    """The texts of a table's log by version, those read last cached; for one thread at a time."""

    def __init__(self, root: Root, name: str, place: str) -> None:
        """`place` is the table's directory below `root`; `name` is for errors."""
        self._root, self._name, self._place = root, name, place
        self._cached: dict[int, str] = {}

    def text(self, version: int) -> str:
        """Return the text of one version. Raises FileNotFoundError where it was pruned."""
        if version not in self._cached:
            self._cached[version] = self._root.read(f"{self._place}/_delta_log/{version:020d}.json").decode()
            for old in sorted(self._cached)[:-CACHED_VERSIONS]:
                del self._cached[old]
        return self._cached[version]

    def texts_after(self, version: int, newest: int) -> list[str] | None:
        """Return the texts of the versions after `version` up to `newest`, oldest first; None where one was pruned."""
        try:
            with border(f"reading the log of table {self._name!r}", self._root.child(self._place)):
                return [self.text(each) for each in range(version + 1, newest + 1)]
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            return None


def prune_log(root: Root, place: str, minutes: int | None = None, dry_run: bool = False) -> int:
    """Delete log files that are older than the newest two checkpoints and than `minutes`; return how many.

    The minutes (RETAINED_MINUTES unless given) are for a process that has listed the log and is about to read it.
    """
    log = f"{place}/_delta_log"
    oldest = datetime.now(UTC) - timedelta(minutes=RETAINED_MINUTES if minutes is None else minutes)
    with border("pruning a log", root.child(log)):
        files = {info.base_name: info for info in root.files.get_file_info(pafs.FileSelector(log))}
        checkpoints = sorted(name for name in files if name.endswith(CHECKPOINT))
        if len(checkpoints) < RETAINED_CHECKPOINTS:
            return 0
        # Versions are padded with zeros, so that names compare as numbers do.
        first = checkpoints[-RETAINED_CHECKPOINTS].removesuffix(CHECKPOINT)
        old = [name for name in files if name.endswith((".json", CHECKPOINT)) and name.partition(".")[0] < first]
        old = [name for name in old if (changed := files[name].mtime) is not None and changed <= oldest]
        for name in old if not dry_run else ():
            with suppress(FileNotFoundError):  # another process prunes as well
                root.delete(f"{log}/{name}")
    return len(old)


def rename_torn_files(root: Root, place: str) -> list[str]:
    """Rename a torn last log file, and a torn newest checkpoint with its pointer; return the new paths, logged.

    A loss of power may tear the file of a commit that was never acknowledged. Without it the table opens again.
    """
    log = f"{place}/_delta_log"
    moved = []
    with border("mending a log", root.child(log)):
        names = root.names(log)
        commits = [name for name in names if name.endswith(".json")]
        checkpoints = [name for name in names if name.endswith(CHECKPOINT)]
        if commits and not is_whole(root.read(f"{log}/{commits[-1]}")):
            moved.append(_rename(root, f"{log}/{commits[-1]}"))
        if checkpoints and not is_parquet(root.read(f"{log}/{checkpoints[-1]}")):
            moved.append(_rename(root, f"{log}/{checkpoints[-1]}"))
            if "_last_checkpoint" in names:
                moved.append(_rename(root, f"{log}/_last_checkpoint"))
    for path in moved:
        logging.getLogger("storage").warning("set aside a torn log file, never acknowledged: %s", root.child(path))
    return moved


def is_whole(data: bytes) -> bool:
    """Say whether a commit's log file is all there: every line JSON, and as many as the commit says of itself."""
    try:
        actions = [json.loads(line) for line in data.splitlines()]
        info = [action["commitInfo"] for action in actions if "commitInfo" in action]
    except (ValueError, TypeError):
        return False
    # The commit's word on itself is a line as well; that of a commit by the library has no count.
    num_actions = len(actions) - 1
    return len(info) == 1 and 0 < num_actions == int(info[0].get("actions", num_actions))


def is_parquet(data: bytes) -> bool:
    """Say whether these bytes are a Parquet file that can be read to the end."""
    try:
        pq.ParquetFile(buffer_reader(data)).read()
    except (pa.ArrowException, OSError):
        return False
    return True


def _rename(root: Root, path: str) -> str:
    root.files.move(path, path + TORN)
    root.make_durable(path + TORN)
    return path + TORN
