"""Quarantines: rollouts that turned out to be unfit for training after they were made, one row for each finding."""

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from storage.delta.cached_table import CachedTable
from storage.errors import QuarantineUnknown
from storage.keys import content_key
from storage.roots import Root
from storage.schemas.system_tables import QUARANTINES
from storage.slices import check_run_name

ALL_RUNS = "all-runs"
"""The run of a finding for which the rollouts of every run were searched."""
ID_LENGTH = 12


@dataclass(frozen=True)
class Quarantine:
    """One finding; the columns of the quarantines table."""

    quarantine: str
    """The finding's id: a digest of its rollouts and its reason."""
    run: str
    where: str
    reason: str
    trace_ids: tuple[str, ...]
    at: datetime
    host: str


class Quarantines(CachedTable):
    """The findings of a store, in memory and kept up to date."""

    def __init__(self, root: Root) -> None:
        super().__init__(root, QUARANTINES)
        self._findings: dict[str, Quarantine] = {}

    def record(self, trace_ids: Iterable[str], *, where: str, reason: str, run: str = ALL_RUNS) -> Quarantine:
        """Record that rollouts are unfit, in one row; the same rollouts for the same reason are one finding.

        Returns the finding that stands: the one written, or the earlier one of the same rollouts and reason.
        """
        check_run_name(run)
        traces = tuple(sorted(set(trace_ids)))
        assert traces, "a quarantine of nothing"
        name = content_key({"trace_ids": list(traces), "reason": reason})[:ID_LENGTH]
        existing = {each.quarantine: each for each in self.all()}.get(name)
        if existing is not None:
            return existing
        finding = Quarantine(name, run, where, reason, traces, datetime.now(UTC), socket.gethostname())
        self.add_records([finding])
        return finding

    def all(self) -> list[Quarantine]:
        """The findings, in order of time; of one that two writers recorded at once, the earlier row."""
        with self._lock:
            self._refresh()
            return sorted(self._findings.values(), key=_age)

    def ids(self) -> list[str]:
        """The ids of all findings, in order of time."""
        return [each.quarantine for each in self.all()]

    def reasons(self, quarantines: Sequence[str]) -> dict[str, str]:
        """The reason for each rollout of the findings named; of a rollout in several, the earliest finding's.

        Raises QuarantineUnknown for an id that the store does not have.
        """
        known = self.all()
        if missing := sorted(set(quarantines) - {each.quarantine for each in known}):
            raise QuarantineUnknown(
                f"there is no quarantine {missing[0]!r}",
                f"the store has: {', '.join(each.quarantine for each in known) or 'none'}",
                do="list them with `stagecoach quarantine --list` and give one of these ids",
            )
        chosen = [each for each in known if each.quarantine in set(quarantines)]
        return {trace: each.reason for each in reversed(chosen) for trace in each.trace_ids}

    def _add_row(self, row: dict[str, Any]) -> None:
        finding = Quarantine(**{**row, "trace_ids": tuple(row["trace_ids"])})
        self._findings[finding.quarantine] = min(self._findings.get(finding.quarantine, finding), finding, key=_age)


def _age(finding: Quarantine) -> tuple[object, ...]:
    return finding.at, finding.run, finding.quarantine
