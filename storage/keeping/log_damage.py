"""Damage to a table's log that Delta Lake does not survive by itself, found file by file and moved aside.

Looked for without opening the table, which such damage may prevent. Some of it Delta would not even notice: a commit
cut at the end of a line is a shorter commit to it, and the rows it added are gone without a word.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime

from storage.errors import border
from storage.logs import CHECKPOINT, is_parquet, is_whole
from storage.roots import Root

POINTER = "_last_checkpoint"
QUARANTINE = "quarantine"


@dataclass(frozen=True)
class LogDamage:
    """What is wrong with the log of one table, and the files in it that have to go for the table to open rightly."""

    table: str
    what: tuple[str, ...]
    files: tuple[str, ...]
    lost_versions: tuple[int, ...] = ()
    """Commits that go with those files; their rows are looked for afterwards."""


def inspect_log(root: Root, table: str) -> LogDamage | None:
    """Look at every file of a table's log that counts; None where nothing is wrong."""
    log = f"tables/{table}/_delta_log"
    with border(f"looking at the log of table {table!r}", root.child(log)):
        names = root.names(log)
        commits = {int(name[:20]): name for name in names if name.endswith(".json") and name[:20].isdecimal()}
        found = [name for name in names if name.endswith(CHECKPOINT)]
        torn = [name for name in found if not is_parquet(root.read(f"{log}/{name}"))]
        good = [int(name[:20]) for name in found if name not in torn]
        what = [f"checkpoint {name} is not whole" for name in torn]
        pointer = _pointer(root, log, names, good)
        lost, why = _broken(root, log, commits, max(good, default=-1))
    if pointer:
        what.append(pointer)
    if lost:
        what.append(f"{why}; versions {lost[0]} to {lost[-1]} cannot be read")
    gone = [commits[version] for version in lost if version in commits]
    files = [*torn, *([POINTER] if pointer and POINTER in names else []), *gone]
    return LogDamage(table, tuple(what), tuple(files), tuple(lost)) if what else None


def set_aside(root: Root, damage: LogDamage) -> str:
    """Move the damaged files into the quarantine, never to be overwritten; return the directory."""
    place = f"{QUARANTINE}/{datetime.now(UTC):%Y%m%dT%H%M%S.%f}/{damage.table}"
    for name in damage.files:
        _move(root, f"tables/{damage.table}/_delta_log/{name}", f"{place}/{name}")
    return root.child(place)


def _move(root: Root, path: str, target: str) -> None:
    """Move a file to a new place, durably."""
    with border("moving a damaged file aside", root.child(path)):
        root.write(target, root.read(path))
        root.delete(path)
    root.make_durable(path.rpartition("/")[0])


def _pointer(root: Root, log: str, names: list[str], checkpoints: list[int]) -> str:
    """What is wrong with the pointer to the last checkpoint; empty where nothing is."""
    if POINTER not in names:
        return ""  # the directory is listed then
    try:
        version = json.loads(root.read(f"{log}/{POINTER}"))["version"]
    except (ValueError, KeyError, TypeError):
        return f"{POINTER} is not whole"
    return "" if version in checkpoints else f"{POINTER} names checkpoint {version}, which is missing or not whole"


def _broken(root: Root, log: str, commits: dict[int, str], base: int) -> tuple[list[int], str]:
    """The versions from the first after `base` that is missing or not whole to the last, and what is wrong with it."""
    last = max([*commits, base])
    for version in range(base + 1, last + 1):
        if version not in commits:
            return list(range(version, last + 1)), f"commit {version} is missing"
        if not is_whole(root.read(f"{log}/{commits[version]}")):
            return list(range(version, last + 1)), f"commit {version} is cut off or no JSON"
    return [], ""
