"""Finds damage in a store: files of logs, slices and policies that are missing, torn, or of other content."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from storage.delta.log import CHECKPOINT, is_parquet, is_whole
from storage.errors import DamagedSlice, PolicyAbsent, StoreError, border
from storage.refs import Entry, Slice
from storage.roots import Root
from storage.store import Store

POINTER = "_last_checkpoint"
QUARANTINE = "quarantine"
"""Directory below the root for damaged files that were moved out of a log."""


@dataclass(frozen=True)
class LogDamage:
    """What is wrong with the log of one table, and the files in it that have to go for the table to open rightly."""

    table: str
    what: tuple[str, ...]
    files: tuple[str, ...]
    lost_versions: tuple[int, ...] = ()
    """Commits that go with those files; their rows are looked for afterwards."""


@dataclass(frozen=True)
class Damage:
    """One output of finished work that cannot be read, and every row of the ledger that names it."""

    entries: tuple[Entry, ...]
    table: str
    what: str
    piece: Slice | None = None
    """The slice; None where it is the weights of a policy."""

    @property
    def key(self) -> str:
        """The key of the work."""
        return self.entries[0].key

    @property
    def stage(self) -> str:
        """The stage of the work."""
        return self.entries[0].stage


def inspect_log(root: Root, table: str) -> LogDamage | None:
    """Look at every file of a table's log that counts; None where nothing is wrong."""
    log = f"tables/{table}/_delta_log"
    with border(f"looking at the log of table {table!r}", root.child(log)):
        names = root.names(log)
        commits = {int(name[:20]): name for name in names if name.endswith(".json") and name[:20].isdecimal()}
        checkpoints = [name for name in names if name.endswith(CHECKPOINT)]
        torn = [name for name in checkpoints if not is_parquet(root.read(f"{log}/{name}"))]
        good = [int(name[:20]) for name in checkpoints if name not in torn]
        what = [f"checkpoint {name} is not whole" for name in torn]
        pointer = _pointer_problem(root, log, names, good)
        lost, why = _lost_versions(root, log, commits, max(good, default=-1))
    if pointer:
        what.append(pointer)
    if lost:
        what.append(f"{why}; versions {lost[0]} to {lost[-1]} cannot be read")
    gone = [commits[version] for version in lost if version in commits]
    files = [*torn, *([POINTER] if pointer and POINTER in names else []), *gone]
    return LogDamage(table, tuple(what), tuple(files), tuple(lost)) if what else None


def set_aside(root: Root, damage: LogDamage) -> str:
    """Move damaged files into a new directory of `quarantine/`; return that directory."""
    place = f"{QUARANTINE}/{datetime.now(UTC):%Y%m%dT%H%M%S.%f}/{damage.table}"
    for name in damage.files:
        _move(root, f"tables/{damage.table}/_delta_log/{name}", f"{place}/{name}")
    return root.child(place)


def inspect_slices(store: Store, deep: bool = False) -> list[Damage]:
    """Look at every slice that the ledger names, by size, with `deep` by digest; expired ones are left out.

    A slice whose files compaction has replaced is read from where its rows are now, in either case.
    """
    naming: dict[Slice, list[Entry]] = {}
    for entry in store.ledger.entries():
        for piece in entry.outputs:
            naming.setdefault(piece, []).append(entry)
    there = {name: store.root.file_sizes(f"tables/{name}") for name in {piece.table for piece in naming}}
    damages = []
    for piece in store.slices.expired_slices.exclude(naming):
        if what := _slice_problem(store, piece, there[piece.table], deep):
            damages.append(Damage(tuple(naming[piece]), piece.table, what, piece))
    return damages


def inspect_policies(store: Store, deep: bool = False) -> list[Damage]:
    """Look at the weights of every policy that the ledger names, by size, with `deep` by digest.

    Weights that were removed on purpose are not missing.
    """
    making: dict[str, list[Entry]] = {}
    for entry in store.ledger.entries():
        if entry.slices("policies"):
            making.setdefault(entry.key, []).append(entry)
    damages = []
    for key, entries in making.items():
        try:
            store.policies.directory(key, verify=deep)
        except (DamagedSlice, PolicyAbsent) as error:
            if isinstance(error, PolicyAbsent) and store.policies.removal_note(key):
                continue
            damages.append(Damage(tuple(entries), "policies", error.what))
    return damages


def consumers(store: Store, keys: Iterable[str]) -> list[Entry]:
    """The finished work that took any of some keys as an input, in the order of the ledger."""
    wanted = {*keys}
    return [entry for entry in store.ledger.entries() if wanted & {*entry.inputs.values()}]


def _pointer_problem(root: Root, log: str, names: list[str], checkpoints: list[int]) -> str:
    """What is wrong with the pointer to the last checkpoint; empty where nothing is."""
    if POINTER not in names:
        return ""  # the directory is listed then
    try:
        version = json.loads(root.read(f"{log}/{POINTER}"))["version"]
    except (ValueError, KeyError, TypeError):
        return f"{POINTER} is not whole"
    return "" if version in checkpoints else f"{POINTER} names checkpoint {version}, which is missing or not whole"


def _lost_versions(root: Root, log: str, commits: dict[int, str], base: int) -> tuple[list[int], str]:
    """The versions from the first after `base` that is missing or not whole to the last, and what is wrong with it."""
    last = max([*commits, base])
    for version in range(base + 1, last + 1):
        if version not in commits:
            return list(range(version, last + 1)), f"commit {version} is missing"
        if not is_whole(root.read(f"{log}/{commits[version]}")):
            return list(range(version, last + 1)), f"commit {version} is cut off or no JSON"
    return [], ""


def _move(root: Root, path: str, target: str) -> None:
    """Move a file to a new place, durably."""
    with border("moving a damaged file aside", root.child(path)):
        root.write(target, root.read(path))
        root.delete(path)
    root.make_durable(path.rpartition("/")[0])


def _slice_problem(store: Store, piece: Slice, there: dict[str, int], deep: bool) -> str:
    paths = [(f"tables/{piece.table}/{file.path}", file.size) for file in piece.files]
    missing = [path for path, _ in paths if path not in there]
    for path, size in paths:
        if not missing and there[path] != size:
            return f"{path} has {there[path]} bytes instead of {size}"
    if not (missing or deep):
        return ""
    try:
        store.read([piece])
    except StoreError as error:
        return f"{missing[0]} is missing, and no compacted file holds its rows" if missing else error.what
    return ""
