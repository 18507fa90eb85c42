"""The log of a Delta table: the actions that a commit consists of, its versions, pruning and torn files.

Each version is a file of JSON lines, one action a line; some have a checkpoint beside them, a Parquet file with all
that the table holds at that version. Commits are written here and not by the library, which reads its whole snapshot
again for each.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from storage.delta.parquet import buffer_reader
from storage.errors import StoreUnavailable, border
from storage.refs import File
from storage.roots import Root

PARTITION = "run"
CHECKPOINT_INTERVAL = 10
"""Least versions from one checkpoint to the next: opening reads every commit since the last."""
CHECKPOINT_SHARE = 100
"""Actions of the last checkpoint for which the next one waits by a version: each costs what the table holds."""
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
POINTER = "_last_checkpoint"
CACHED_VERSIONS = 64
"""Versions of the log whose actions stay in memory."""
# A loss of power may tear the newest: the table then opens from the one before it.
RETAINED_CHECKPOINTS = 2
RETAINED_MINUTES = 1


Action = Mapping[str, Any]
"""One line of a version: what it does by its one name, `add`, `remove`, `txn`, `commitInfo`, `metaData`, `protocol`."""


LAST = "\U0010ffff"
"""The last character there is: greater than every attempt."""


class VersionTaken(Exception):
    """Another writer has committed the version; for storage's own use."""


@dataclass(frozen=True)
class ActiveFile:
    """One file that a table holds now: its path, size, run, and the least and greatest attempt in it.

    `added_at` is the time of its writer's clock in milliseconds.
    """

    path: str
    size: int
    run: str
    first_attempt: str
    last_attempt: str
    added_at: int = 0

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "ActiveFile":
        """The file out of a row of Delta's list of additions; where attempts are not known, it may hold any."""
        first, last = row.get("min.attempt"), row.get("max.attempt")
        added_at = row["modification_time"]
        return cls(row["path"], row["size_bytes"], row["partition.run"], first or "", last or LAST, added_at)

    @classmethod
    def from_addition(cls, add: Mapping[str, Any]) -> "ActiveFile":
        """The file out of an action that adds it."""
        stats = json.loads(add.get("stats") or "{}")
        first, last = (stats.get(name, {}).get("attempt") for name in ("minValues", "maxValues"))
        place = add["path"], add["size"], add["partitionValues"][PARTITION]
        return cls(*place, first or "", last or LAST, add["modificationTime"])


def addition(file: File, rows: pa.Table, partition: Mapping[str, str], statistics: Sequence[str], new: bool) -> Action:
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
    add = {"path": file.path, "partitionValues": dict(partition), "size": file.size, "modificationTime": _now()}
    return {"add": {**add, "dataChange": new, "stats": json.dumps(stats)}}


def removal(file: ActiveFile, partition: Mapping[str, str]) -> Action:
    """The action that removes a file. Not marked as a change of data, which Delta refuses in an append-only table."""
    remove = {"path": file.path, "deletionTimestamp": _now(), "dataChange": False, "extendedFileMetadata": True}
    return {"remove": {**remove, "partitionValues": dict(partition), "size": file.size}}


def commit_actions(actions: Sequence[Action], numbers: Mapping[str, int], witness: str) -> list[Action]:
    """All actions of one version: what the commit says of itself, what it does, and its numbers by application id."""
    marks: list[Action] = [{"txn": {"appId": name, "version": number}} for name, number in numbers.items()]
    info = {
        "timestamp": _now(),
        "operation": "WRITE",
        "operationParameters": {"mode": "Append", "partitionBy": json.dumps([PARTITION])},
        "witness": witness,
        "actions": len(actions) + len(marks),
    }
    return [{"commitInfo": info}, *actions, *marks]


def new_paths(actions: Sequence[Action]) -> list[str]:
    """The paths of files with new rows that one version adds; not of those that replace others."""
    return [each["add"]["path"] for each in actions if "add" in each and each["add"]["dataChange"]]


def numbers_of(actions: Sequence[Action]) -> dict[str, int]:
    """The numbers by application id that one version commits."""
    return {each["txn"]["appId"]: int(each["txn"]["version"]) for each in actions if "txn" in each}


def has_witness(actions: Sequence[Action], witness: str) -> bool:
    """Say whether a version is the commit that has this name for itself."""
    return any(each["commitInfo"].get("witness") == witness for each in actions if "commitInfo" in each)


def _now() -> int:
    return int(time.time() * 1000)


@dataclass(frozen=True)
class CheckpointPointer:
    """What a log says of its last checkpoint: its version, and how many actions are in it."""

    version: int
    size: int


class Log:
    """The versions of one table's log, those seen last cached; for one thread at a time."""

    def __init__(self, root: Root, place: str) -> None:
        """`place` is the table's directory below `root`."""
        self._root, self._directory = root, f"{place}/_delta_log"
        self._cached: dict[int, list[Action]] = {}

    def actions(self, version: int) -> list[Action]:
        """Return the actions of one version. Raises FileNotFoundError where it was pruned or is not there yet."""
        if version not in self._cached:
            data = self._root.read(self._path(version))
            if not is_whole(data):
                what, do = f"version {version} of the log is cut off or no JSON", "run `stagecoach repair`"
                raise StoreUnavailable(what, self._root.child(self._path(version)), "every version before it", do)
            actions: list[Action] = [json.loads(line) for line in data.splitlines()]
            self._cache(version, actions)
            return actions  # an old one is not in the cache
        return self._cached[version]

    def actions_after(self, version: int, newest: int) -> list[list[Action]] | None:
        """Return those of the versions after `version` up to `newest`, oldest first; None where one was pruned."""
        with suppress(FileNotFoundError):
            return [self.actions(each) for each in range(version + 1, newest + 1)]
        return None

    def create(self, version: int, actions: Sequence[Action]) -> None:
        """Commit a version, durable and whole or not at all. Raises VersionTaken where it is not the next one."""
        text = "".join(f"{json.dumps(action, separators=(',', ':'))}\n" for action in actions)
        if not self._root.create(self._path(version), text.encode()):
            raise VersionTaken(version)
        if not self.holds(version - 1):
            # Others went on and pruned the log past this version while we slept: nobody will ever read ours.
            with suppress(FileNotFoundError):
                self._root.delete(self._path(version))
            raise VersionTaken(version)
        self._cache(version, list(actions))

    def holds(self, version: int) -> bool:
        """Say whether a version is still there: then every later one is, for the oldest are pruned first."""
        return self._root.exists(self._path(version)) or self._root.exists(self._checkpoint(version))

    def make_durable(self, version: int) -> None:
        """Force a version to the disk."""
        self._root.make_durable(self._path(version))

    def needs_checkpoint(self, version: int) -> bool:
        """Say whether it is time for a checkpoint at a version: see CHECKPOINT_INTERVAL and CHECKPOINT_SHARE."""
        if (version + 1) % CHECKPOINT_INTERVAL:
            return False
        last = self.last_checkpoint()
        return last is None or (version - last.version) * CHECKPOINT_SHARE >= last.size

    def last_checkpoint(self) -> CheckpointPointer | None:
        """The last checkpoint; None where there is none, or it is not known."""
        try:
            last = json.loads(self._root.read(f"{self._directory}/{POINTER}"))
            return CheckpointPointer(int(last["version"]), int(last["size"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def read_checkpoint(self, version: int) -> bytes:
        """The bytes of a checkpoint. Raises FileNotFoundError where it was pruned."""
        return self._root.read(self._checkpoint(version))

    def add_checkpoint(self, pointer: CheckpointPointer, data: bytes) -> None:
        """Write a checkpoint, then that it is the last one, both durable."""
        self._root.create(self._checkpoint(pointer.version), data)
        self._root.replace(f"{self._directory}/{POINTER}", json.dumps(vars(pointer)).encode())

    def make_checkpoint_durable(self, version: int) -> None:
        """Force a checkpoint, which the library wrote, and its pointer to the disk."""
        self._root.make_durable(self._checkpoint(version), f"{self._directory}/{POINTER}")

    def _cache(self, version: int, actions: list[Action]) -> None:
        self._cached[version] = actions
        for old in sorted(self._cached)[:-CACHED_VERSIONS]:
            del self._cached[old]

    def _path(self, version: int) -> str:
        return f"{self._directory}/{version:020d}.json"

    def _checkpoint(self, version: int) -> str:
        return f"{self._directory}/{version:020d}{CHECKPOINT}"


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
        # Oldest first and without a gap: whoever finds a version knows that those after it are there.
        old = list(takewhile(lambda name: (at := files[name].mtime) is not None and at <= oldest, sorted(old)))
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
            if POINTER in names:
                moved.append(_rename(root, f"{log}/{POINTER}"))
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
    except (pa.ArrowException, OSError, ValueError):  # damaged names in a footer are a UnicodeDecodeError
        return False
    return True


def _rename(root: Root, path: str) -> str:
    root.files.move(path, path + TORN)
    root.make_durable(path + TORN)
    return path + TORN
