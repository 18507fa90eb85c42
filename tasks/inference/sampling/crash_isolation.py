"""CrashIsolation: which rollouts crash their environment server, so that they cost the others nothing.

A rollout stage owns one for all its samplers, whose ServerPool uses it in their event loops. A rollout that was in
flight at MIN_LOSSES losses of its server is isolated: its sampler plays it alone, after all others. One that loses its
server twice like that is a row with this error. Another step or an evaluation may use the same server at the same
time, so one loss alone proves nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.inference.engine.client import OF_POLICY
from tasks.inference.trace_rows.failures import Failure

MIN_LOSSES = 2
"""Losses of its server with a rollout in flight after which the rollout is isolated."""
MAX_LONE_LOSSES = 2
"""Losses of its server that an isolated rollout survives, less one."""
MAX_CRASHERS = 2
"""Rollouts of a group that may crash the server before the rest of the group fails untried."""


@dataclass
class InFlightRollout:
    """An assignment that is being sampled, with the environment server and the replica of the engine that have it."""

    assignment_id: str
    group_id: str
    environment: str
    server: str = ""
    replica: str = ""
    is_isolated: bool = False

    @property
    def places(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Its environment and server, and OF_POLICY and its replica."""
        return (self.environment, self.server), (OF_POLICY, self.replica)


class CrashIsolation:
    """Counts losses of environment servers by the rollouts that were in flight."""

    def __init__(self) -> None:
        self._losses = Counter[str]()
        self._lone_losses = Counter[tuple[str, str]]()
        """By group and assignment: losses while that rollout was isolated."""

    def record(self, in_flight: Sequence[InFlightRollout]) -> bool:
        """Count a loss of a server with its rollouts; return whether a single isolated one may have caused it."""
        self._losses.update(rollout.assignment_id for rollout in in_flight)
        alone = len(in_flight) == 1 and in_flight[0].is_isolated
        if alone:
            self._lone_losses[in_flight[0].group_id, in_flight[0].assignment_id] += 1
        return alone

    def isolates(self, assignment_id: str) -> bool:
        """Return whether a rollout is to be played alone."""
        return self._losses[assignment_id] >= MIN_LOSSES

    def failure(self, assignment: Mapping[str, Any]) -> Failure | None:
        """Return why an assignment is not sampled any more; None where it is."""
        group_id, name = assignment["group_id"], assignment["assignment_id"]
        crashers = {rollout for rollout, count in self._lone_losses.items() if count >= MAX_LONE_LOSSES}
        num_crashers = sum(group == group_id for group, _ in crashers)
        if (group_id, name) in crashers:
            text = (
                f"environment server {assignment['environment']!r} died {MAX_LONE_LOSSES} times while this rollout "
                "alone was in flight; it is not tried again"
            )
        elif num_crashers >= MAX_CRASHERS:
            text = (
                f"not tried: {num_crashers} other rollouts of its group took their environment server down, each alone"
            )
        else:
            return None
        return Failure("infrastructure", "ServerLost", text)
