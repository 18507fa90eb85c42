"""Log: the versions of a Delta table, the actions and the digest of each, and what is damaged in them.

Each version is a file of JSON lines, one action a line; some have a checkpoint, a Parquet file with all that the table
holds at that version. Commits are written here and not by the library, which reads its whole snapshot again for each.

A text is sealed when the first empty digest in it is replaced by the SHA-256 of all of it. Commits of other programs,
and of this one before it had seals, carry none: they are only checked for being whole.
"""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.delta.parquet import buffer_reader
from storage.errors import StoreError, StoreUnavailable, border
from storage.keys import sha256
from storage.refs import File
from storage.roots import Root, check_inside

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
HEADS = "heads"
"""Directory below the root of files that say, each for one table, which commit of its log is the newest."""
CHECKPOINT = ".checkpoint.parquet"
CHECKPOINT_COLUMNS = {"add", "metaData", "protocol", "txn"}
POINTER = "_last_checkpoint"
READERS = 16
"""Commits of a log in an object store that are read at a time."""
CACHED_VERSIONS = 64
"""Versions of the log whose actions stay in memory."""
Action = Mapping[str, Any]
"""One line of a version: what it does by its one name, `add`, `remove`, `txn`, `commitInfo`, `metaData`, `protocol`."""


LAST = "\U0010ffff"
"""The last character there is: greater than every attempt."""


UNSEALED = {"timestamp", "operation", "operationParameters", "witness", "actions", "engineInfo", "clientVersion"}
"""Keys of a commitInfo that this program wrote before there were seals; deltalake, which wrote the first, adds two."""


class Head(NamedTuple):
    """The newest commit of a log, as a file beside it says: its version, and the SHA-256 of its file."""

    version: int
    sha256: str


def seal(text: str) -> bytes:
    """Put the digest of a text in the place of the first empty one, `"digest":""`, in it."""
    return text.replace('"digest":""', f'"digest":"{sha256(text.encode())}"', 1).encode()


def is_sealed(data: bytes, digest: object) -> bool:
    """Say whether a text, but for the digest in it, is what the digest was made of."""
    said = str(digest).encode(errors="replace")
    return sha256(data.replace(b'"digest":"%b"' % said, b'"digest":""', 1)).encode() == said


def is_whole_commit(data: bytes) -> bool:
    """Say whether the file of a commit is what was written; of one without a digest, whether all of it is there."""
    try:
        actions: list[dict[str, Any]] = [json.loads(line) for line in data.splitlines()]
        (info,) = [dict(action["commitInfo"]) for action in actions if "commitInfo" in action]
        if "digest" in info:
            return is_sealed(data, info["digest"])
        # One of ours says how many actions it has; a bit may have been flipped in the word digest itself.
        is_whole = 0 < len(actions) - 1 == int(info.get("actions", len(actions) - 1))
        return is_whole and not ("witness" in info and info.keys() - UNSEALED)
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def parse_head(data: bytes) -> Head | None:
    """Read the file that names the newest commit; None where it is empty, as a loss of power leaves it.

    Raises ValueError for any other text.
    """
    if not data:
        return None
    content = json.loads(data)
    if not (isinstance(content, dict) and is_sealed(data, content.pop("digest", ""))):
        raise ValueError("its digest is another")
    return Head(**content)


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

    def __post_init__(self) -> None:
        check_inside(self.path, "the log of a table")

    @property
    def attempt(self) -> str:
        """The attempt whose rows it holds; empty where there may be several."""
        return self.first_attempt if self.first_attempt == self.last_attempt else ""

    @classmethod
    def from_addition(cls, add: Mapping[str, Any]) -> "ActiveFile":
        """The file out of an action that adds it; where attempts are not known, it may hold any."""
        stats = json.loads(add.get("stats") or "{}")
        first, last = (stats.get(name, {}).get("attempt") for name in ("minValues", "maxValues"))
        place = add["path"], add["size"], dict(add["partitionValues"])[PARTITION]
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


def creation_actions(schema: pa.Schema) -> list[Action]:
    """The actions of the version that makes a table, partitioned by run, for readers and writers of any Delta."""
    from deltalake import Schema  # `snapshot` has: weights are published and read without it

    metadata = {
        "id": str(uuid4()),
        "name": None,
        "description": None,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": Schema.from_arrow(schema).to_json(),
        "partitionColumns": [PARTITION],
        "createdTime": _now(),
        "configuration": PROPERTIES,
    }
    protocol = {"minReaderVersion": 1, "minWriterVersion": 2}
    return commit_actions([{"protocol": protocol}, {"metaData": metadata}], {}, uuid4().hex, "CREATE TABLE")


def commit_actions(
    actions: Sequence[Action], numbers: Mapping[str, int], witness: str, operation: str = "WRITE"
) -> list[Action]:
    """All actions of one version: what the commit says of itself, what it does, and its numbers by application id."""
    marks: list[Action] = [{"txn": {"appId": name, "version": number}} for name, number in numbers.items()]
    info = {
        "digest": "",  # the first of all texts in the commit: it is sealed when it is written
        "timestamp": _now(),
        "operation": operation,
        "operationParameters": {"mode": "Append", "partitionBy": json.dumps([PARTITION])},
        "witness": witness,
        "actions": len(actions) + len(marks),
    }
    return [{"commitInfo": info}, *actions, *marks]


def new_paths(actions: Sequence[Action]) -> list[str]:
    """The paths of files with new rows that one version adds; not of those that replace others."""
    return [action["add"]["path"] for action in actions if "add" in action and action["add"]["dataChange"]]


def numbers_of(actions: Sequence[Action]) -> dict[str, int]:
    """The numbers by application id that one version commits."""
    return {action["txn"]["appId"]: int(action["txn"]["version"]) for action in actions if "txn" in action}


def has_witness(actions: Sequence[Action], witness: str) -> bool:
    """Say whether a version is the commit that has this name for itself."""
    return any(action["commitInfo"].get("witness") == witness for action in actions if "commitInfo" in action)


def _parse_actions(data: bytes) -> list[Action]:
    return [json.loads(line) for line in data.splitlines()]


def _now() -> int:
    return int(time.time() * 1000)


@dataclass(frozen=True)
class CheckpointPointer:
    """What a log says of its last checkpoint: its version, how many actions are in it, the SHA-256 of its file.

    The digest is empty of a checkpoint that another program wrote, or this one before it took digests.
    """

    version: int
    size: int
    digest: str = ""


@dataclass(frozen=True)
class LogDamage:
    """What is wrong with the log of one table, and the files in it that have to go for the table to open rightly."""

    table: str
    what: tuple[str, ...]
    files: tuple[str, ...] = ()
    lost_versions: tuple[int, ...] = ()
    """Commits that go with those files; their rows are looked for afterwards."""


class Log:
    """The versions of one table's log, those seen last cached; for one thread at a time."""

    def __init__(self, root: Root, place: str, has_head: bool = False) -> None:
        """`place` is the table's directory below `root`; with `has_head` a file elsewhere says what the newest is.

        Without, nobody notices when the newest commits are missing.
        """
        self._root, self._place, self._directory = root, place, f"{place}/_delta_log"
        self._head = head_path(place.rpartition("/")[2]) if has_head else ""
        self._cached: dict[int, list[Action]] = {}

    def actions(self, version: int) -> list[Action]:
        """Return the actions of one version. Raises FileNotFoundError where it was pruned or is not there yet."""
        if version not in self._cached:
            data = self._root.read(self._path(version))
            if not is_whole_commit(data):
                raise self._error(f"version {version} of the log is damaged", self._path(version))
            actions = _parse_actions(data)
            self._cache(version, actions)
            return actions  # an old one is not in the cache
        return self._cached[version]

    def check(self) -> int | None:
        """Return the version of the newest checkpoint, -1 where there is none, and None where there is no log at all.

        Raises StoreUnavailable where something is wrong with what the table is opened from; see `inspect`.
        """
        # Others may commit and prune while we look: what was only that is not there any more at the second look.
        with border("looking at a log", self.address):
            damage, newest = self._inspect()
            if damage:
                damage, newest = self._inspect()
            if damage:
                raise self._error("; ".join(damage.what), self._directory)
            return newest

    def inspect(self) -> LogDamage | None:
        """Look at the checkpoints, the pointer, the head and every commit that is read; None where nothing is wrong."""
        return self._inspect(deep=True)[0]

    def _inspect(self, deep: bool = False) -> tuple[LogDamage | None, int | None]:
        """The damage, and the newest whole checkpoint as `check` returns it.

        Without `deep` the pointer is not looked at, and of checkpoints without a digest only the newest: where a loss
        of power has torn it, the table opens from what is before it.
        """
        self._cached.clear()  # a repair in another process may have put other versions in the place of those
        head, no_head = self._read_head()  # first: a commit that it tells of is in the list then
        names = self._root.names(self._directory)
        commits = {int(name[:20]): name for name in names if name.endswith(".json") and name[:20].isdecimal()}
        checkpoints = [int(name[:20]) for name in names if name.endswith(CHECKPOINT) and name[:20].isdecimal()]
        pointer = self.last_checkpoint()
        torn = [version for version in checkpoints if self._is_torn(version, pointer, deep)]
        what = [f"checkpoint {version} is damaged" for version in torn]
        files = [f"{version:020d}{CHECKPOINT}" for version in torn]
        good = [version for version in checkpoints if version not in torn]
        sealed = pointer.version if pointer and pointer.digest else -1
        while good and not deep and good[-1] != sealed and not is_checkpoint(self.read_checkpoint(good[-1])):
            good.pop()
        if POINTER in names and (torn or deep) and (pointer is None or pointer.version not in good):
            what, files = [*what, f"{POINTER} names no checkpoint that is there"], [*files, POINTER]
        what += [f"{self._head} is damaged"] if no_head else []
        lost, why = self._lost_versions(commits, max(good, default=-1), head)
        what += [f"{why}; versions {lost[0]} to {lost[-1]} cannot be read"] if lost else []
        gone = [commits[version] for version in lost if version in commits]
        table = self._place.rpartition("/")[2]
        newest = max(good, default=-1) if commits or checkpoints else None
        return LogDamage(table, tuple(what), tuple([*files, *gone]), tuple(lost)) if what else None, newest

    def actions_after(self, version: int, newest: int) -> list[list[Action]] | None:
        """Return those of the versions after `version` up to `newest`, oldest first; None where one was pruned."""
        with suppress(FileNotFoundError):
            return [self.actions(each) for each in range(version + 1, newest + 1)]
        return None

    def create(self, version: int, actions: Sequence[Action]) -> None:
        """Commit a version, durable and whole or not at all. Raises VersionTaken where it is not the next one."""
        text = seal("".join(f"{json.dumps(action, separators=(',', ':'))}\n" for action in actions))
        if not self._root.create(self._path(version), text):
            raise VersionTaken(version)
        if version and not self.holds(version - 1):
            # Others went on and pruned the log past this version while we slept: nobody will ever read ours.
            with suppress(FileNotFoundError):
                self._root.delete(self._path(version))
            raise VersionTaken(version)
        self._cache(version, list(actions))
        if self._head:
            # The commit is done: a head that is left behind, by a crash or a full disk, tells of one before.
            with suppress(StoreError):
                newest = {"digest": "", "version": version, "sha256": sha256(text)}
                self._root.replace(self._head, seal(json.dumps(newest, separators=(",", ":"))), durable=False)

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
            return CheckpointPointer(int(last["version"]), int(last["size"]), str(last.get("digest", "")))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def read_checkpoint(self, version: int) -> bytes:
        """The bytes of a checkpoint. Raises FileNotFoundError where it was pruned."""
        return self._root.read(self._checkpoint(version))

    def add_checkpoint(self, version: int, size: int, data: bytes) -> None:
        """Write a checkpoint of so many actions, then that it is the last one, both durable."""
        if self._root.create(self._checkpoint(version), data):
            pointer = CheckpointPointer(version, size, sha256(data))
            self._root.replace(f"{self._directory}/{POINTER}", json.dumps(vars(pointer)).encode())

    def _is_torn(self, version: int, pointer: CheckpointPointer | None, deep: bool) -> bool:
        """Whether a checkpoint is not what was written: by its digest where it is known, with `deep` by reading it."""
        digest = pointer.digest if pointer and pointer.version == version else ""
        data = self.read_checkpoint(version) if digest or deep else b""
        return bool(digest and sha256(data) != digest) or (deep and not is_checkpoint(data))

    def _lost_versions(self, commits: Mapping[int, str], base: int, head: Head | None) -> tuple[list[int], str]:
        """The versions from the first after `base` that is missing or damaged to the last, and what is wrong there."""
        last = max([*commits, base, head.version if head else -1])
        if last < 0:  # no log: of a table that has data it is gone, and else about to be made
            has_data = self._root.names(self._place) not in ([], ["_delta_log"])
            return ([0], "the log is missing") if has_data else ([], "")
        wanted = sorted(version for version in commits if version > base)
        problems = self._commit_problems(wanted, head)
        for version in range(base + 1, last + 1):
            if why := problems.get(version, "is missing"):
                return list(range(version, last + 1)), f"commit {version} {why}"
        return [], ""

    def _commit_problems(self, versions: Sequence[int], head: Head | None) -> dict[int, str]:
        if self._root.directory is not None:
            return {version: self._commit_problem(version, head) for version in versions}
        with ThreadPoolExecutor(READERS) as pool:  # an object store takes its time, and a large table has hundreds
            return dict(zip(versions, pool.map(lambda each: self._commit_problem(each, head), versions), strict=True))

    def _commit_problem(self, version: int, head: Head | None) -> str:
        try:
            data = self._root.read(self._path(version))
        except FileNotFoundError:
            return "is missing"
        if not is_whole_commit(data) or (head and head.version == version and sha256(data) != head.sha256):
            return "is damaged"
        # However many there are: the snapshot that is opened takes them from here.
        self._cached[version] = _parse_actions(data)
        return ""

    def _read_head(self) -> tuple[Head | None, bool]:
        """The newest commit by the file that names it, and whether that file is damaged."""
        if self._head:
            with suppress(FileNotFoundError):
                data = self._root.read(self._head)  # raises for a link out of the store, which is no damage
                try:
                    return parse_head(data), False
                except (ValueError, TypeError):
                    return None, True
        return None, False

    @property
    def address(self) -> str:
        """Where the log is."""
        return self._root.child(self._directory)

    def _error(self, what: str, path: str) -> StoreUnavailable:
        safe = "every version before it, and all files of the table; nothing was changed"
        return StoreUnavailable(f"{what}", self._root.child(path), safe, "run `stagecoach repair`")

    def _cache(self, version: int, actions: list[Action]) -> None:
        self._cached[version] = actions
        for old in sorted(self._cached)[:-CACHED_VERSIONS]:
            del self._cached[old]

    def _path(self, version: int) -> str:
        return f"{self._directory}/{version:020d}.json"

    def _checkpoint(self, version: int) -> str:
        return f"{self._directory}/{version:020d}{CHECKPOINT}"


def head_path(table: str) -> str:
    """Where the file lies, below the root, that says which commit of a table's log is the newest."""
    return f"{HEADS}/{table}.json"


def is_checkpoint(data: bytes) -> bool:
    """Say whether these bytes are a Parquet file that can be read to the end, with the columns of a checkpoint."""
    try:
        return {*pq.ParquetFile(buffer_reader(data)).read().column_names} >= CHECKPOINT_COLUMNS
    except (pa.ArrowException, OSError, ValueError):  # damaged names in a footer are a UnicodeDecodeError
        return False
