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
class Starting:
    """A service that somebody begins to wait for."""

    service: str


@dataclass(frozen=True)
class ServiceNote:
    """A service that keeps the run waiting: it still starts, or was ready and does not answer."""

    service: str
    text: str

    def __str__(self) -> str:
        return f"{self.service}: {self.text}"


@dataclass(frozen=True)
class LogLines:
    """What a service has written into its log since the last news of it."""

    service: str
    lines: Sequence[str]


ServiceNews = ServiceLoss | Starting | ServiceNote | LogLines
