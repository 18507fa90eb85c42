"""TurnCache: the engine's answers for rollouts in flight, so that a run does not sample them again after a crash.

Turns are rows of the table `turns` that no ledger row names. Only a run that samples the same rollouts again reads
them, and they are removed when the groups of the rollouts are committed.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Self
from uuid import uuid4

import pyarrow as pa

from storage.commits import GroupCommitter
from storage.errors import StoreError
from storage.maintenance.sweep import drop_slices
from storage.refs import File, Slice
from storage.schemas.stage_tables import TURNS
from storage.store import Store

LINGER_SECONDS = 1.0
"""How long a first turn waits for others that then share its commit."""
PAUSE_RATIO = 3.0
"""Pause after a commit, in durations of that commit."""
_log = logging.getLogger("stagecoach")


@dataclass(frozen=True)
class CachedTurn:
    """What the engine answered to one model call of a rollout."""

    group_id: str
    assignment_id: str
    request: str
    """Digest of what was asked."""
    answer: str
    """The engine's answer as it came, in JSON."""
    policies: tuple[str, ...]
    """The keys of the policies that sampled it; none where a frozen model did."""


_NO_TURN = CachedTurn("", "", "", "", ())
"""Of no group, so it is never committed: it lets the thread, which alone writes, remove files without needed turns."""


class TurnCache(GroupCommitter[CachedTurn]):
    """The turns of one run that are still needed; a context in which a thread commits and removes them.

    A turn is durable about LINGER_SECONDS after `put`. If the block ends by an error all turns are committed; if it
    ends without one no turn is needed any longer. While the store refuses they wait, and the log says so.
    """

    def __init__(self, store: Store, run: str) -> None:
        """Read the turns of an earlier process of the run; unreadable files are ignored, and their turns resampled."""
        super().__init__("turns", LINGER_SECONDS, PAUSE_RATIO, on_refusal=_log_refusal)
        self._store, self._run_name = store, run
        self._turns: dict[str, dict[tuple[str, str], CachedTurn]] = {}
        """By group, then by assignment and request."""
        self._groups: dict[str, set[str]] = {}
        """By attempt, each of which has a file: the groups whose turns in it are needed."""
        self._load()

    def __enter__(self) -> Self:
        self.start()
        self._remove_unneeded()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if kind is None:
                self.forget([*self._turns])
        finally:
            self.stop()
        if error and (lost := self._select_needed(self.waiting)):
            error.add_note(f"{len(lost)} turns of rollouts under way are lost as well, and sampled again.")

    def of(self, group_id: str) -> list[CachedTurn]:
        """Return the turns of a group, in the order in which they came."""
        with self.lock:
            return [*self._turns.get(group_id, {}).values()]

    def put(self, turn: CachedTurn) -> None:
        """Keep a turn, in place of one of the same rollout and request by other policies; returns immediately."""
        with self.lock:
            turns, place = self._turns.setdefault(turn.group_id, {}), (turn.assignment_id, turn.request)
            if place in turns and turns[place].policies == turn.policies:
                return
            turns[place] = turn
        super().put(turn)

    def _wake(self) -> None:
        super().put(_NO_TURN)

    def forget(self, groups: Iterable[str]) -> None:
        """Drop the turns of groups that are committed, or not needed any longer."""
        with self.lock:
            gone = {group for group in groups if self._turns.pop(group, None)}
            for needed in self._groups.values():
                needed -= gone
        self._remove_unneeded()

    def _load(self) -> None:
        table = self._store.table(TURNS.name)
        for file in reversed(table.active_files(self._run_name)):
            groups = self._groups.setdefault(file.first_attempt, set())
            try:
                rows = table.read(file.path).select(TURNS.arrow.names).to_pylist()
            except StoreError:
                continue
            for turn in (CachedTurn(**row | {"policies": tuple(row["policies"])}) for row in rows):
                groups.add(turn.group_id)
                self._turns.setdefault(turn.group_id, {})[turn.assignment_id, turn.request] = turn

    def _select_needed(self, turns: Iterable[CachedTurn]) -> list[CachedTurn]:
        with self.lock:
            return [turn for turn in turns if turn.group_id in self._turns]

    def _find_emptied(self) -> list[str]:
        with self.lock:
            return [attempt for attempt, groups in self._groups.items() if not groups]

    def _remove_unneeded(self) -> None:
        if self._find_emptied():
            self._wake()

    def _commit(self, items: Sequence[CachedTurn]) -> None:
        """Commit the turns that are needed, then remove the files in which none is."""
        if turns := self._select_needed(items):
            rows, attempt = pa.Table.from_pylist([asdict(turn) for turn in turns], TURNS.arrow), uuid4().hex
            self._store.append(TURNS.name, rows, run=self._run_name, step=0, key=TURNS.name, attempt=attempt)
            with self.lock:
                self._groups[attempt] = {turn.group_id for turn in self._select_needed(turns)}
        if emptied := self._find_emptied():
            try:
                self._remove(emptied)
            except Exception as refusal:  # the turns are committed; the next commit tries it again
                _log_refusal(refusal)

    def _remove(self, emptied: Sequence[str]) -> None:
        """Take files out of the table, and off the disk."""
        table = self._store.table(TURNS.name)
        table.refresh()
        slices = [
            Slice(table.name, self._run_name, file.attempt, 0, "", (File(file.path, file.size, ""),))
            for file in table.active_files(self._run_name)
            if file.attempt in emptied
        ]
        drop_slices(self._store, slices)
        with self.lock:
            self._groups = {attempt: groups for attempt, groups in self._groups.items() if attempt not in emptied}


def _log_refusal(refusal: Exception) -> None:
    _log.warning("turns of rollouts under way are not kept for now: %s", refusal)
