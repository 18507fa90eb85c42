"""What stages ask of whoever keeps the engines alive."""

from contextlib import AbstractContextManager
from typing import Protocol

from configs.algorithms import TeacherConfig
from tasks.inference.engine.scoring import Served
from tasks.runtime.stage import Policy

MOST_LOSSES = 10
"""Times that a service may be lost in one stage; restarts of dead ones are bounded by their own sections."""


class EngineRoom(Protocol):
    """Whoever keeps the engine of the policies alive."""

    def at(self, policy: Policy) -> Served:
        """Return where `policy` is served, for who holds it or knows that nobody else asks for another."""
        ...

    def holding(self, policy: Policy) -> AbstractContextManager[Served]:
        """Give where `policy` is served, checked against the learner's probe; it stays there within the block."""
        ...


class TeacherRoom(Protocol):
    """Whoever keeps the engines of frozen models alive."""

    def at(self, teacher: TeacherConfig) -> Served:
        """Return where a teacher is served, by the weights that its version says."""
        ...
