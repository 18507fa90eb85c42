"""A table's log as files: dropping what checkpoints have superseded, and setting aside what a loss of power tore.

The cost of a commit grows with the number of log files, so those before the last checkpoints go. The table library
could do that itself, but would keep one checkpoint alone, before it is known to be on the disk.

A commit is acknowledged only when its log file is on the disk, and log files appear whole or not at all to other
processes. So a last log file that is not whole was never acknowledged, and a checkpoint that is not whole repeats what
the log files say. Both are renamed, never deleted.
"""

import json
import logging
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from storage.errors import border
from storage.parquet import source_of
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
