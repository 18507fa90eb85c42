"""Turns of rollouts that have not ended: the engine's answers, so that it need not be asked again after a crash.

They are rows of the table `turns` that no ledger row names. Nobody reads them but a run that samples the same rollouts
again, and they go when the groups of these are committed.
"""

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self
from uuid import uuid4

import pyarrow as pa

from storage.delta.table import CommitConflict
from storage.errors import StoreError
from storage.schemas.stage_tables import TURNS
from storage.store import Store

PAUSE_SECONDS = 1.0
"""Between two commits, so that turns that end at about the same time share one."""
PAUSE_RATIO = 3.0
"""The pause in durations of the commit before, where that is longer."""


_log = logging.getLogger("stagecoach")


@dataclass(frozen=True)
class KeptTurn:
    """What the engine answered to one model call of a rollout."""

    group_id: str
    assignment_id: str
    request: str
    """Digest of what was asked."""
    answer: str
    """The engine's answer as it came, in JSON."""
    policies: tuple[str, ...]
    """The keys of the policies that sampled it; none where a frozen model did."""


class KeptTurns:
    """The turns of one run that are still needed; a context in which a thread commits and removes them.

    A turn that is put is durable about PAUSE_SECONDS later. Where the block ends by an error all turns that were put
    are committed, and where it ends by itself nobody needs any of them. While the store refuses they wait, and it is
    said in the log.
    """

    def __init__(self, store: Store, run: str) -> None:
        """Read what an earlier process of the run has left; what of it cannot be read is sampled again."""
        self._store, self._run = store, run
        self._turns: dict[str, dict[tuple[str, str], KeptTurn]] = {}
        """By group, then by assignment and request."""
        self._groups: dict[str, set[str]] = {}
        """By attempt, each of which has a file: the groups of which it has turns that are needed."""
        self._waiting: dict[tuple[str, str], KeptTurn] = {}
        """Those that are not committed, by assignment and request."""
        self._changed = threading.Condition()
        self._closing = False
        self._load()
        self._thread = threading.Thread(target=self._work, name="turns", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.forget([*self._turns])
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if error and self._waiting:
            error.add_note(f"{len(self._waiting)} turns of rollouts under way are lost as well, and sampled again.")

    def of(self, group_id: str) -> list[KeptTurn]:
        """Return the turns of a group that are known, in the order in which they came."""
        with self._changed:
            return [*self._turns.get(group_id, {}).values()]

    def put(self, turn: KeptTurn) -> None:
        """Keep a turn, in place of one of the same rollout and request by other policies; returns at once."""
        with self._changed:
            known, place = self._turns.setdefault(turn.group_id, {}), (turn.assignment_id, turn.request)
            if place not in known or known[place].policies != turn.policies:
                known[place] = self._waiting[place] = turn
                self._changed.notify_all()

    def forget(self, groups: Iterable[str]) -> None:
        """Give up the turns of some groups: these are committed, or not needed any more."""
        with self._changed:
            gone = {each for each in groups if self._turns.pop(each, None)}
            self._waiting = {place: each for place, each in self._waiting.items() if each.group_id not in gone}
            for left in self._groups.values():
                left -= gone
            self._changed.notify_all()

    def _load(self) -> None:
        table = self._store.table(TURNS.name)
        for file in (each for each in reversed(table.active_files()) if each.run == self._run):
            left = self._groups.setdefault(file.first_attempt, set())
            try:
                rows = table.read(file.path).select(TURNS.arrow.names).to_pylist()
            except StoreError:
                continue
            for turn in (KeptTurn(**row | {"policies": tuple(row["policies"])}) for row in rows):
                left.add(turn.group_id)
                self._turns.setdefault(turn.group_id, {})[turn.assignment_id, turn.request] = turn

    def _work(self) -> None:
        while self._wait():
            began = time.monotonic()
            try:
                self._commit()
                self._remove()
            except StoreError as refused:
                _log.warning("turns of rollouts under way are not kept for now: %s", refused)
                if self._closing:
                    return
            with self._changed:
                pause = max(PAUSE_SECONDS, PAUSE_RATIO * (time.monotonic() - began))
                self._changed.wait_for(lambda: self._closing, pause)

    def _wait(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting or self._find_emptied())
            return bool(self._waiting or self._find_emptied())

    def _find_emptied(self) -> list[str]:
        return [attempt for attempt, left in self._groups.items() if not left]

    def _commit(self) -> None:
        with self._changed:
            turns = dict(self._waiting)
        if not turns:
            return
        rows, attempt = pa.Table.from_pylist([asdict(each) for each in turns.values()], TURNS.arrow), uuid4().hex
        self._store.append(TURNS.name, rows, run=self._run, step=0, key=TURNS.name, attempt=attempt)
        with self._changed:
            self._waiting = {place: each for place, each in self._waiting.items() if turns.get(place) is not each}
            self._groups[attempt] = {each.group_id for each in turns.values()}.intersection(self._turns)

    def _remove(self) -> None:
        """Take files with turns that nobody needs out of the table, and off the disk."""
        with self._changed:
            emptied = self._find_emptied()
        if not emptied:
            return
        table = self._store.table(TURNS.name)
        table.refresh()
        files = [each for each in table.active_files() if each.run == self._run and each.first_attempt in emptied]
        try:
            if files:  # else another process has taken them out
                table.replace(files, [], self._run)
        except CommitConflict:  # another process is at it
            return
        for each in files:
            self._store.root.remove_unneeded(f"{table.place}/{each.path}")
        with self._changed:
            self._groups = {attempt: left for attempt, left in self._groups.items() if attempt not in emptied}
