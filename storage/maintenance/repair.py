"""Finds damage in a store and repairs it, so that everything in it can be trusted again, and says what was lost.

Damage is a file of a log, a slice or a policy that is missing, torn, or of other content. Logs come first, table by
table: damaged files are moved out, the table is what its last whole commit says, and rows that later commits added are
put back where their files are whole. What is to be done is written down before anything is moved: a repair that is
killed is gone on with by the next, and nobody else opens the store until then. Then everything that the ledger names is
checked. Work that cannot be read can be forgotten, and is then computed again.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from storage.delta.log import (
    CHECKPOINT,
    HEADS,
    Log,
    LogDamage,
    VersionTaken,
    creation_actions,
    head_path,
    is_whole_commit,
)
from storage.delta.table import StoredTable
from storage.errors import DamagedSlice, PolicyAbsent, StoreError, border
from storage.maintenance.references import References
from storage.maintenance.sweep import drop_slices
from storage.records import REMOVED
from storage.refs import Entry, Slice
from storage.roots import Root
from storage.schemas.stage_tables import TABLES
from storage.schemas.system_tables import LEDGER, SYSTEM_TABLES
from storage.store import REPAIR, Store

QUARANTINE = "quarantine"
"""Directory below the root for damaged files that were moved out of a log."""


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


def inspect_logs(root: Root) -> list[LogDamage]:
    """Look at the logs of all tables of a store; return what an earlier repair had found where it has not ended."""
    if begun := _unfinished_repair(root)[1]:
        return begun
    # Of a table whose directory is gone, its head is left.
    there = {*root.names("tables"), *(name.removesuffix(".json") for name in root.names(HEADS))}
    found = []
    for name in sorted(there & {*TABLES}):
        with border(f"looking at the log of table {name!r}", root.child(f"tables/{name}/_delta_log")):
            damage = Log(root, f"tables/{name}", has_head=TABLES[name] in SYSTEM_TABLES).inspect()
        if damage:
            found.append(damage)
    return found


def _unfinished_repair(root: Root) -> tuple[str, list[LogDamage]]:
    """Where a repair that was killed was moving files to, and what it had found; empty where there is none."""
    with border("looking for an earlier repair", root.child(REPAIR)), suppress(FileNotFoundError):
        record = json.loads(root.read(REPAIR))
        damages = [
            LogDamage(each["table"], tuple(each["what"]), tuple(each["files"]), tuple(each["lost_versions"]))
            for each in record["damages"]
        ]
        return str(record["place"]), damages
    return "", []


def set_aside(root: Root, damage: LogDamage, place: str) -> str:
    """Move damaged files, and the head of their log, below a directory of `quarantine/`; return where they are."""
    place = f"{place}/{damage.table}"
    for name in damage.files:
        _move(root, f"tables/{damage.table}/_delta_log/{name}", f"{place}/{name}")
    # Last: as long as it tells of a commit that is not there, nobody opens the table. The next commit writes another.
    _move(root, head_path(damage.table), f"{place}/head.json")
    return root.child(place)


def inspect_slices(store: Store, deep: bool = False) -> list[Damage]:
    """Look at every slice that the ledger names, by size, with `deep` by digest; expired ones are left out.

    A slice whose files compaction has replaced is read from where its rows are now, in either case.
    """
    references = References(store)
    sizes = {table: store.root.file_sizes(f"tables/{table}") for table in references.tables()}
    damages = []
    for piece in references.live_slices():
        if what := _slice_problem(store, piece, sizes[piece.table], deep):
            damages.append(Damage(tuple(references.slices[piece]), piece.table, what, piece))
    return damages


def inspect_policies(store: Store, deep: bool = False) -> list[Damage]:
    """Look at the weights of every policy that the ledger names, by size, with `deep` by digest.

    Weights that were removed on purpose are not missing.
    """
    damages = []
    for key, entries in References(store).policies.items():
        try:
            store.policies.directory(key, verify=deep)
        except (DamagedSlice, PolicyAbsent) as error:
            if isinstance(error, PolicyAbsent) and store.policies.removal_note(key):
                continue
            damages.append(Damage(tuple(entries), "policies", error.what))
    return damages


def _move(root: Root, path: str, target: str) -> None:
    """Move a file to a new place, durable there before it is taken away; one that was moved already is fine."""
    with border("moving a damaged file aside", root.child(path)), suppress(FileNotFoundError):
        root.create(target, root.read(path))
        root.delete(path)
        root.make_durable(path)


def _slice_problem(store: Store, piece: Slice, sizes: dict[str, int], deep: bool) -> str:
    odd = [path for file in piece.files if sizes.get(path := f"tables/{piece.table}/{file.path}") != file.size]
    if odd or deep:
        try:
            store.read([piece])
        except StoreError as error:
            return ": ".join([*odd[:1], error.what])
    return ""


@dataclass(frozen=True)
class RepairedLog:
    """One log that was brought back to its last whole commit."""

    damage: LogDamage
    quarantine: str
    """Where the damaged files are now."""
    restored: tuple[str, ...] = ()
    """Data files of the lost commits that count again."""
    removed_again: int = 0
    """Rows of the ledger that gc had removed with their files, and that were there again."""


def repair_logs(root: Root, damages: Sequence[LogDamage]) -> list[RepairedLog]:
    """Set damaged log files aside and put back what their commits had added, where it is found whole.

    Stage tables come after the ledger, whose rows say which files are theirs. Called again after it was killed at any
    moment, with what `inspect_logs` returns then, it ends the same.
    """
    if not damages:
        return []
    place = _unfinished_repair(root)[0] or f"{QUARANTINE}/{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
    # What the lost commits were is known only as long as they are there, or where it is written down.
    record = {"place": place, "damages": [vars(damage) for damage in damages]}
    root.replace(REPAIR, json.dumps(record).encode())
    # All of them first: to open the store is to read the logs of several tables.
    places = {damage.table: set_aside(root, damage, place) for damage in damages}
    for damage in damages:
        _make_log(root, damage.table)
    system = [table.name for table in SYSTEM_TABLES]
    order = sorted(damages, key=lambda damage: (damage.table not in system, damage.table))
    repaired = []
    for damage in order:
        # Opened anew each time: what the last round put back decides what counts in this one.
        store = Store(root)
        restored: tuple[str, ...] = ()
        if damage.lost_versions:
            restore = _restore_system_table if damage.table in system else _restore_stage_table
            restored = tuple(restore(store, damage.table))
        again = _remove_again(store) if damage.lost_versions and damage.table == LEDGER.name else 0
        repaired.append(RepairedLog(damage, places[damage.table], restored, again))
    root.delete(REPAIR)
    return repaired


def inspect_tables(store: Store) -> list[LogDamage]:
    """Find the stage tables that do not hold slices which the ledger names: commits of their logs are missing."""
    references, damages = References(store), []
    for name in references.tables():
        if lost := store.slices.not_held(name, references.live_slices(name)):
            damages.append(LogDamage(name, (f"it does not hold {len(lost)} slices that the ledger names",)))
    return damages


def repair_tables(store: Store, damages: Sequence[LogDamage]) -> list[RepairedLog]:
    """Put back the files of slices that stage tables do not hold, where they are whole; see `inspect_tables`."""
    return [RepairedLog(damage, "", tuple(_restore_stage_table(store, damage.table))) for damage in damages]


def _make_log(root: Root, name: str) -> None:
    """Make the log of a table anew where none of it is left."""
    contract, log = TABLES[name], f"tables/{name}/_delta_log"
    if not any(each.endswith((".json", CHECKPOINT)) for each in root.names(log)):
        schema = contract.arrow if contract in SYSTEM_TABLES else contract.stored
        with suppress(VersionTaken):
            Log(root, f"tables/{name}").create(0, creation_actions(schema))


@dataclass(frozen=True)
class ForgetPlan:
    """Which damaged work can be computed again, and which not: `lost` is sampled work that other work was made of."""

    rows: tuple[Entry, ...]
    again: tuple[Damage, ...]
    lost: tuple[Damage, ...]


def plan_forget(store: Store, damages: Sequence[Damage], repeatable: Collection[str]) -> ForgetPlan:
    """Find out which damaged work can be forgotten, so that it is done again under the same key.

    Work of the stages `repeatable` always gives the same rows. Other work can only be done again while nothing was
    made of it: its key would stand for other rows than those that went into the rest.
    """
    consumed = {key for entry in store.ledger.entries() for key in entry.inputs.values()}
    again = [damage for damage in damages if damage.stage in repeatable or damage.key not in consumed]
    keys = {damage.key for damage in again}
    pieces = {damage.piece for damage in again if damage.piece}
    rows = [e for e in store.ledger.entries() if e.key in keys and (not e.part or pieces & {*e.outputs})]
    return ForgetPlan(tuple(rows), tuple(again), tuple(damage for damage in damages if damage not in again))


def forget(store: Store, forgetting: ForgetPlan) -> int:
    """Remove the rows of work that is to be done again, then what is left of its files; return how many rows went.

    Weights that are still whole stay: they are found again, and the work must give the same ones.
    """
    now = datetime.now(UTC)
    # Rows before files, as in gc: no row may ever name what is gone.
    num_rows = 0
    for run in sorted({entry.run for entry in forgetting.rows}):
        rows = {(entry.key, entry.part) for entry in forgetting.rows if entry.run == run}
        num_rows += store.ledger.remove(run, rows, now, whole=False)
    named = References(store).slices
    drop_slices(store, [damage.piece for damage in forgetting.again if damage.piece and damage.piece not in named])
    for damage in forgetting.again:
        if damage.piece is None:
            store.policies.remove(damage.key, "`stagecoach repair --forget`: they were damaged")
    return num_rows


def _remove_again(store: Store) -> int:
    """Remove the rows of removed runs that came back with a lost commit, unless all that they name is there."""
    num_rows = 0
    for run in store.runs.names():
        if store.runs.last_event(run) == REMOVED:
            entries = [entry for entry in store.ledger.entries(run=run) if not _is_readable(store, entry.outputs)]
            rows = {(entry.key, entry.part) for entry in entries}
            num_rows += store.ledger.remove(run, rows, datetime.now(UTC), whole=False)
    return num_rows


def _restore_stage_table(store: Store, name: str) -> list[str]:
    """Put back the files of slices that the ledger names and the table does not hold."""
    restored = []
    for piece in store.slices.not_held(name, [*References(store, table=name).slices]):
        try:
            rows = store.slices.read_stored(piece)
        except StoreError:
            continue  # found again when what the ledger names is looked at
        store.slices.table(name).commit_files([(piece.files[0], rows)], piece.run)
        restored.append(piece.files[0].path)
    return restored


def _restore_system_table(store: Store, name: str) -> list[str]:
    """Put back files that no readable commit speaks of, less the rows that the table has: those of the lost commits.

    A row of the ledger counts only if all that it names can be read. The newest file comes first: where a process died
    between the file and its commit, the work was done again, and the row that was committed is the later one. Finished
    work of such a process that nobody did again is put back too: nothing tells it from a lost commit.
    """
    table = store.table(name)
    held = {file.path for file in table.active_files()} | _removed_files(store.root, table)
    known = {row_id for file in table.active_files() for row_id in _row_ids(name, file.path, table.read(file.path))}
    restored = []
    for path in reversed(store.root.paths_older(table.place, 0, ".parquet")):
        inside = path.removeprefix(f"{table.place}/")
        if not inside.startswith("run=") or inside in held:
            continue
        rows = table.read(inside)
        row_ids = _row_ids(name, inside, rows)
        new = rows.filter(pa.array([row_id not in known for row_id in row_ids]))
        if new.num_rows and (
            name != LEDGER.name
            or all(_is_readable(store, map(Slice.from_row, row["outputs"])) for row in new.to_pylist())
        ):
            run = inside.split("/")[0].removeprefix("run=")
            table.append(new, run)
            known |= {*row_ids}
            restored.append(inside)
    return restored


def _row_ids(name: str, path: str, rows: pa.Table) -> list[tuple[object, ...]]:
    """What names each row of a file; the partition stands for the run, which its rows do not hold."""
    names = [column for column in TABLES[name].row_id if column in rows.schema.names]
    return [(path.split("/")[0], *row.values()) for row in rows.select(names).to_pylist()]


def _is_readable(store: Store, pieces: Iterable[Slice]) -> bool:
    try:
        for piece in pieces:
            store.read([piece])
    except StoreError:
        return False
    return True


def _removed_files(root: Root, table: StoredTable) -> set[str]:
    """The files that readable commits took out of a table: merged into others, or removed."""
    log = f"{table.place}/_delta_log"
    commits = [root.read(f"{log}/{name}") for name in root.names(log) if name.endswith(".json")]
    # A damaged one may still be there: nobody reads a commit that a checkpoint holds.
    lines = (line for commit in commits if is_whole_commit(commit) for line in commit.splitlines())
    return {action["remove"]["path"] for line in lines if "remove" in (action := json.loads(line))}
