"""A table's log as files: the text of each version, checkpoints, and what a loss of power tore."""

import json
import logging
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from storage.delta.parquet import source_of
from storage.errors import StoreUnavailable, border
from storage.roots import Root

TORN = ".torn"
CHECKPOINT = ".checkpoint.parquet"
CHECKPOINT_INTERVAL = 10
"""Versions from one checkpoint to the next: what opening and committing cost grows with the commits since the last."""
KEPT_CHECKPOINTS = 2
KEPT_MINUTES = 1


def prune_log(root: Root, place: str, minutes: int | None = None, dry_run: bool = False) -> int:
    """Delete log files older than the newest two checkpoints and than so many minutes (KEPT_MINUTES); return how many.

    The minutes are for a process that has listed the log and is about to read it.
    """
    log = f"{place}/_delta_log"
    oldest = datetime.now(UTC) - timedelta(minutes=KEPT_MINUTES if minutes is None else minutes)
    with border("pruning a log", root.child(log)):
        files = {info.base_name: info for info in root.files.get_file_info(pafs.FileSelector(log))}
        checkpoints = sorted(name for name in files if name.endswith(CHECKPOINT))
        if len(checkpoints) < KEPT_CHECKPOINTS:
            return 0
        first_kept = checkpoints[-KEPT_CHECKPOINTS].removesuffix(CHECKPOINT)
        old = [name for name in files if name.endswith((".json", CHECKPOINT)) and name.partition(".")[0] < first_kept]
        old = [name for name in old if (changed := files[name].mtime) is not None and changed <= oldest]
        for name in old if not dry_run else ():
            with suppress(FileNotFoundError):  # another process prunes as well
                root.delete(f"{log}/{name}")
    return len(old)


def set_aside_torn(root: Root, place: str) -> list[str]:
    """Rename a torn last log file, and a torn newest checkpoint with its pointer; return the new paths, logged."""
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
    num_actions = len(actions) - 1
    return len(info) == 1 and 0 < num_actions == int(info[0].get("actions", num_actions))


def is_parquet(data: bytes) -> bool:
    """Say whether these bytes are a Parquet file that can be read to the end."""
    try:
        pq.ParquetFile(source_of(data)).read()
    except (pa.ArrowException, OSError):
        return False
    return True


def _rename(root: Root, path: str) -> str:
    root.files.move(path, path + TORN)
    root.make_durable(path + TORN)
    return path + TORN


KEPT_LOGS = 64
"""Versions of the log that are kept in memory once read."""


class LogTexts:
    """The log of one table as texts by version; for one thread at a time, as the table's lock sees to."""

    def __init__(self, root: Root, name: str, place: str) -> None:
        """`place` is the table's directory below `root`; `name` is for errors."""
        self._root, self._name, self._place = root, name, place
        self._kept: dict[int, str] = {}

    def of(self, version: int) -> str:
        """Return the text of one version. Raises FileNotFoundError where it was pruned."""
        if version not in self._kept:
            self._kept[version] = self._root.read(f"{self._place}/_delta_log/{version:020d}.json").decode()
            for old in sorted(self._kept)[:-KEPT_LOGS]:
                del self._kept[old]
        return self._kept[version]

    def after(self, seen: int, newest: int) -> list[str] | None:
        """Return the texts of the versions after `seen` up to `newest`, oldest first; None where one was pruned."""
        try:
            with border(f"reading the log of table {self._name!r}", self._root.child(self._place)):
                return [self.of(version) for version in range(seen + 1, newest + 1)]
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            return None
