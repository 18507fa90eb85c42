"""Ref and Policy: how tasks refer to finished work and to a version of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from storage.refs import Entry


@dataclass(frozen=True)
class Ref:
    """What travels between tasks: the key of finished work and how many rows it made."""

    stage: str
    step: int
    key: str
    rows: tuple[tuple[str, int], ...]
    """Rows by table."""
    tokens: int
    seconds: float
    """Wall-clock that the work took when it was computed."""
    computed: bool
    """False where the ledger already had it."""
    run: str = field(default="", compare=False)
    """The run that computed it; empty where it is still to come."""

    def num_rows(self, table: str) -> int:
        """Return how many rows of `table` this work made."""
        return dict(self.rows)[table]


@dataclass(frozen=True)
class Policy:
    """A version of the weights, by the key of the work that made it."""

    key: str
    version: int


def inputs_of(refs: Sequence[Ref], policy: Policy | None = None) -> dict[str, str]:
    """Return the keys of a stage's inputs by the name of the stage that made them; the second of a stage is name.1."""
    keys: dict[str, str] = {}
    for ref in refs:
        # Inputs of one stage are numbered in their order, which is part of the key.
        number = sum(name.partition(".")[0] == ref.stage for name in keys)
        keys[f"{ref.stage}.{number}" if number else ref.stage] = ref.key
    return keys | ({"policy": policy.key} if policy else {})


def ref_of(entry: Entry, computed: bool) -> Ref:
    """Return the reference to a finished piece of work."""
    rows: dict[str, int] = {}
    for piece in entry.outputs:
        # A stage that commits in parts has several slices of a table.
        rows[piece.table] = rows.get(piece.table, 0) + piece.rows
    seconds = (entry.finished_at - entry.started_at).total_seconds()
    # Of work that was taken over from another run, the slices are still that run's.
    maker = entry.outputs[0].run if entry.outputs else entry.run
    return Ref(entry.stage, entry.step, entry.key, tuple(rows.items()), entry.tokens, seconds, computed, maker)


def rows_of(refs: Sequence[Ref]) -> dict[str, dict[str, int]]:
    """Return the rows that were made, by stage and table."""
    rows: dict[str, dict[str, int]] = {}
    for ref in refs:
        of_stage = rows.setdefault(ref.stage, {})
        of_stage |= {table: of_stage.get(table, 0) + count for table, count in ref.rows}
    return rows
