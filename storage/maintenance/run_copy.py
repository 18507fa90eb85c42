"""Copies finished work from one store into another: same keys, attempts and digests, so that it reads there as here.

Weights and slices come first and are seen by nobody; then the events of the runs; the rows of the ledger come last,
those of a run in one commit. Dying in between leaves nothing of the work visible, and copying again continues.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from storage.errors import CopyConflict
from storage.maintenance.references import References
from storage.records import REMOVED
from storage.refs import Entry, Slice
from storage.slices import WrittenSlice
from storage.store import Store

# One commit for many files is quick; not for all, since their rows are in memory until then.
FILES_AT_ONCE = 64
"""Files of one table and run in one commit."""
LEFT_BEHIND = "a copy of the run without its weights"
"""The reason in errors of the other store about weights that were not copied."""


@dataclass
class CopyReport:
    """What was not in the other store before."""

    rows: int = 0
    """Rows of the ledger."""
    slices: int = 0
    policies: int = 0
    records: int = field(default=0, compare=False)
    """Events and notes of the runs, and quarantines."""

    @property
    def nothing(self) -> bool:
        """Whether all of it was there before."""
        return not (self.rows or self.slices or self.policies or self.records)


def copy_work(
    source: Store, target: Store, entries: Sequence[Entry], runs: Sequence[str], with_policies: bool = False
) -> CopyReport:
    """Copy rows of the ledger with their slices, and the events of `runs`; return what was new.

    Quarantines come along, all of them: replays of the copy leave out what those of the original do. Weights come
    `with_policies` only; without, their place says so. Raises CopyConflict, with nothing written, where the other
    store has other rows under one of the keys or another run of one of the names; DamagedSlice where rows here are not
    those that were written, PolicyConflict, NoSpace, StoreUnavailable.
    """
    for run in runs:
        _require_same_run(source, target, run)
    new = _new_rows(target, entries)
    known = {_name(piece): piece for piece in References(target).slices}
    done = CopyReport(rows=len(new))
    done.policies = _copy_policies(source, target, entries, with_policies)
    pieces = {piece: known.get(_name(piece)) for piece in References(source, new).slices}
    copied = _copy_slices(source, target, [piece for piece, there in pieces.items() if there is None])
    done.slices = len(copied)
    done.records = _copy_records(source, target, runs)
    names = {piece: there or copied[piece] for piece, there in pieces.items()}
    # What went into a run comes before the run itself: whoever dies in between leaves rows whose inputs are there.
    for run in sorted({entry.run for entry in new}, key=lambda run: (run in runs, run)):
        rows = [entry for entry in new if entry.run == run]
        rows = [replace(entry, outputs=tuple(names[piece] for piece in entry.outputs)) for entry in rows]
        target.ledger.commit_all(rows, copied=frozenset(copied.values()))
    return done


def _require_same_run(source: Store, target: Store, run: str) -> None:
    if run not in target.runs.names():
        return
    begun, here = target.runs.events(run)[0], source.runs.events(run)[0]
    if begun != here:
        raise _conflict(
            f"there is another run {run!r}: it began at {begun.at:%Y-%m-%d %H:%M:%S}, this one at "
            f"{here.at:%Y-%m-%d %H:%M:%S}",
            target,
        )


def _new_rows(target: Store, entries: Sequence[Entry]) -> list[Entry]:
    """Return the rows that the other store lacks; raise CopyConflict where it has other ones under one of the keys."""
    existing = target.ledger.entries()
    by_key = {(row.key, row.part): row for row in existing}
    for entry in entries:
        row = by_key.get((entry.key, entry.part))
        if row is not None and _content(row) != _content(entry):
            raise _conflict(
                f"run {row.run!r} has other rows under the key of stage {entry.stage!r} at step {entry.step} of run "
                f"{entry.run!r}: {entry.key}",
                target,
            )
    there = {row.row_id for row in existing}
    return [entry for entry in entries if entry.row_id not in there]


def _content(entry: Entry) -> list[tuple[str, int, str]]:
    return sorted((piece.table, piece.rows, piece.digest) for piece in entry.outputs)


def _name(piece: Slice) -> tuple[str, str, str, str]:
    return piece.table, piece.run, piece.attempt, piece.digest


def _copy_slices(source: Store, target: Store, pieces: Sequence[Slice]) -> dict[Slice, Slice]:
    """Copy slices; return what the other store calls each. Of those whose rows expired it is noted that they did."""
    unexpired = source.slices.expired_slices.exclude(pieces)
    names = {piece: piece for piece in pieces}
    full = [piece for piece in unexpired if piece.files]
    for table, run in sorted({(piece.table, piece.run) for piece in full}):
        own = [piece for piece in full if (piece.table, piece.run) == (table, run)]
        for start in range(0, len(own), FILES_AT_ONCE):
            written: dict[Slice, WrittenSlice] = {}
            for piece in own[start : start + FILES_AT_ONCE]:
                written[piece] = target.slices.copy(piece, source.slices)
            target.slices.commit(table, list(written.values()))
            names |= {piece: each.piece for piece, each in written.items()}
    expired = target.slices.expired_slices.exclude(piece for piece in pieces if piece not in unexpired)
    target.slices.expired_slices.add_records(source.slices.expired_slices.find(expired))
    return names


def _copy_records(source: Store, target: Store, runs: Sequence[str]) -> int:
    """Copy events and notes of runs, and quarantines, that the other store has not; return how many."""
    num_events = 0
    for run in runs:
        events = source.runs.events(run)
        there = [*target.runs.events(run), *target.runs.lost_services(run)] if run in target.runs.names() else []
        new = [event for event in (*events, *source.runs.lost_services(run)) if event not in there]
        target.runs.add_records(new)
        num_events += len(new)
        if target.runs.last_event(run) == REMOVED != events[-1].event:  # it was removed there, and is back
            target.runs.add_records([replace(events[-1], at=target.runs.next_moment())])
    known = set(target.quarantines.ids())
    findings = [finding for finding in source.quarantines.all() if finding.quarantine not in known]
    target.quarantines.add_records(findings)
    there_already = {each.note for each in target.notes.all()}
    notes = [each for run in runs for each in source.notes.all(run) if each.note not in there_already]
    target.notes.add_records(notes)
    return num_events + len(findings) + len(notes)


def _copy_policies(source: Store, target: Store, entries: Iterable[Entry], with_weights: bool) -> int:
    """Publish the weights of the rows' policies, or note that they stayed behind; return how many were copied."""
    keys = References(source, entries).policies
    num_copied = 0
    # Bases come before the adapters that are laid over them.
    for key in [*sorted(source.policies.adapter_bases(keys) - {*keys}), *keys]:
        policy, there = source.policies.find(key), target.policies.find(key)
        removed = source.policies.removal_note(key)
        if policy is not None and with_weights:
            if there is None or not {*policy.files} <= {*there.files}:
                directory = source.policies.directory(key)
                target.policies.publish(directory, key, policy.weights_sha256)
                num_copied += 1
        elif there is None and policy is not None:
            target.policies.note_removal(key, policy.weights_sha256, LEFT_BEHIND)
        elif there is None and removed is not None:
            target.policies.note_removal(key, **removed)
    return num_copied


def _conflict(what: str, target: Store) -> CopyConflict:
    return CopyConflict(
        what,
        target.root.address,
        "both stores are as they were: nothing was written",
        "copy into a new store, or into one without that run",
    )
