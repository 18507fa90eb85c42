"""News of a run's services, which its watchers hear: starts, losses, missing answers, lines of logs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServiceLoss:
    """A service that ended without being asked to by its flow."""

    service: str
    how: str
    restart: int
    """Which restart follows; 0 where none does."""
    max_restarts: int
    log: Path

    def __str__(self) -> str:
        restart = f"restart {self.restart} of {self.max_restarts}" if self.restart else "it is not started again"
        return f"{self.service}: {self.how}; {restart}; log: {self.log}"


@dataclass(frozen=True)
class SlowStart:
    """A service that somebody waits for and that is not ready yet."""

    service: str
    seconds: float
    log: Path

    def __str__(self) -> str:
        return f"{self.service}: still starting, {self.seconds:.0f} s; log: {self.log}"


@dataclass(frozen=True)
class Starting:
    """A service that somebody begins to wait for."""

    service: str
    last_seconds: float | None
    """How long its last start took on this machine, in this run or another of its store; None where nobody knows."""

    def __str__(self) -> str:
        return f"{self.service}: starting"


@dataclass(frozen=True)
class NoAnswer:
    """A service that was ready and answers nothing: what needs it waits."""

    service: str
    seconds: float
    hang_seconds: float
    log: Path

    def __str__(self) -> str:
        return (
            f"{self.service}: no answer for {self.seconds:.0f} s; the run waits for it, and starts it again after "
            f"{self.hang_seconds:g} s without one; log: {self.log}"
        )


@dataclass(frozen=True)
class LogLines:
    """What a service has written into its log since the last news of it."""

    service: str
    lines: Sequence[str]


ServiceNews = ServiceLoss | SlowStart | Starting | NoAnswer | LogLines
