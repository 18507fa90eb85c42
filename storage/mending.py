"""Setting aside what a loss of power tore at the end of a table's log.

A commit is acknowledged only when its log file is on the disk, and log files appear whole or not at all to other
processes. So a last log file that is not whole was never acknowledged, and a checkpoint that is not whole repeats what
the log files say. Both are renamed, never deleted.
"""

import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import border
from storage.roots import Root

TORN = ".torn"


def set_aside_torn(root: Root, place: str) -> list[str]:
    """Rename a torn last log file, and a torn newest checkpoint with its pointer; return the new paths, logged."""
    log = f"{place}/_delta_log"
    moved = []
    with border("mending a log", root.child(log)):
        names = root.names(log)
        commits = [name for name in names if name.endswith(".json")]
        checkpoints = [name for name in names if name.endswith(".checkpoint.parquet")]
        if commits and not _is_log(root.read(f"{log}/{commits[-1]}")):
            moved.append(_rename(root, f"{log}/{commits[-1]}"))
        if checkpoints and not _is_parquet(root.read(f"{log}/{checkpoints[-1]}")):
            moved.append(_rename(root, f"{log}/{checkpoints[-1]}"))
            if "_last_checkpoint" in names:
                moved.append(_rename(root, f"{log}/_last_checkpoint"))
    for path in moved:
        logging.getLogger("storage").warning("set aside a torn log file, never acknowledged: %s", root.child(path))
    return moved


def _is_log(data: bytes) -> bool:
    try:
        return all(isinstance(json.loads(line), dict) for line in data.splitlines())
    except ValueError:
        return False


def _is_parquet(data: bytes) -> bool:
    try:
        pq.ParquetFile(pa.BufferReader(data)).read()
    except (pa.ArrowException, OSError):
        return False
    return True


def _rename(root: Root, path: str) -> str:
    root.files.move(path, path + TORN)
    root.make_durable(path + TORN)
    return path + TORN
