"""References: what travels between stages instead of rows, and what the ledger holds."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from storage.errors import StoreError
from storage.keys import canonical_json

# A run's name is that of a directory and of a schema in SQL; a dot in front would hide the directory.
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_run_name(run: str) -> None:
    """Raise StoreError unless a run's name can be a directory's name everywhere."""
    if not RUN_NAME.fullmatch(run):
        safe = "nothing was written; everything in the ledger stands"
        raise StoreError(f"{run!r} cannot name a run", "", safe, "use letters, digits, dot, dash and underscore")


@dataclass(frozen=True)
class File:
    """One immutable file: its path relative to its table's (or policy's) root, its size in bytes, its digest."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Slice:
    """The rows of one attempt at one key in one table.

    `digest` is over the rows' values in order and outlives compaction; `files` are the files as first written, none
    for a slice without rows. `run` is the run that computed the rows.
    """

    table: str
    run: str
    attempt: str
    rows: int
    digest: str
    files: tuple[File, ...]

    @property
    def bytes(self) -> int:
        """The size of its files as first written."""
        return sum(file.size for file in self.files)

    def to_row(self) -> dict[str, Any]:
        """The slice as a value of the `SLICE` struct."""
        return {**vars(self), "files": [vars(file) for file in self.files]}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Slice":
        """The slice out of a value of the `SLICE` struct."""
        return cls(**{**row, "files": tuple(File(**file) for file in row["files"])})


@lru_cache(maxsize=512)
def parse_json(text: str) -> Mapping[str, Any]:
    """Return what JSON of the ledger says; of all rows of a stage it is the same text, and nobody changes a mapping."""
    parsed: Mapping[str, Any] = json.loads(text)
    return parsed


def identity(key: str, slices: Iterable[Slice]) -> tuple[str, ...]:
    """Return a key with the attempts of the rows that were made under it, each once."""
    return (key, *dict.fromkeys(piece.attempt for piece in slices))


@dataclass(frozen=True)
class Entry:
    """One ledger row: a finished piece of work as a run uses it, or (with `part`) a finished part of one.

    `section`, `inputs` and `versions` are plain mappings; times are aware, in UTC, microseconds.
    """

    run: str
    step: int
    stage: str
    stage_version: int
    key: str
    part: str
    attempt: str
    section: Mapping[str, Any]
    inputs: Mapping[str, str]
    outputs: tuple[Slice, ...]
    started_at: datetime
    finished_at: datetime
    tokens: int = 0
    versions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def row_id(self) -> tuple[str, str, str]:
        """What names the row: run, key, part."""
        return self.run, self.key, self.part

    @property
    def identity(self) -> tuple[str, ...]:
        """What names exactly the rows that were made: key and attempts; see `storage.read.lineage.Work.identity`."""
        return identity(self.key, self.outputs)

    @property
    def age(self) -> tuple[datetime, str, str]:
        """What orders rows of one key by when they were finished: the least is the first, also between equal clocks."""
        return self.finished_at, self.run, self.attempt

    def slices(self, table: str) -> tuple[Slice, ...]:
        """The outputs in one table, in order."""
        return tuple(output for output in self.outputs if output.table == table)

    def to_row(self) -> dict[str, Any]:
        """The entry as a row of the ledger table."""
        return {
            **vars(self),
            "section": canonical_json(self.section),
            "inputs": [{"name": name, "key": key} for name, key in sorted(self.inputs.items())],
            "outputs": [output.to_row() for output in self.outputs],
            "versions": canonical_json(self.versions),
        }
