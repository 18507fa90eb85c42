"""CrashIsolation: finds the rollouts that crash their environment server, so that they cost the others nothing.

A rollout stage owns one for all its samplers, which use it in their event loops. A group that was in flight at
MIN_LOSSES losses of its server is isolated: a sampler begins it after all others, one rollout at a time. A rollout that
loses its server twice like that is a row with this error. Another step or an evaluation may use the same server at the
same time, so one loss alone proves nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.inference.sampling.lost_servers import InFlightRollout
from tasks.inference.trace_rows.failures import Failure

MIN_LOSSES = 2
"""Losses of its server with a group in flight after which the group is isolated."""
MAX_LONE_LOSSES = 2
"""Losses of its server that an isolated rollout survives, less one."""
MAX_CRASHERS = 2
"""Rollouts of a group that may crash the server before the rest of the group fails untried."""


class CrashIsolation:
    """Counts losses of environment servers by the rollouts that were in flight."""

    def __init__(self) -> None:
        self._losses = Counter[str]()
        """By group."""
        self._lone_losses = defaultdict[str, Counter[str]](Counter)
        """By group and assignment: losses while that rollout alone was in flight, isolated."""

    def record(self, in_flight: Sequence[InFlightRollout], is_isolated: bool) -> bool:
        """Count a loss of a server with its rollouts; return whether a single isolated one may have caused it."""
        self._losses.update({rollout.group_id for rollout in in_flight})
        if not is_isolated or len(in_flight) != 1:
            return False
        (rollout,) = in_flight
        self._lone_losses[rollout.group_id][rollout.assignment_id] += 1
        return True

    def isolates(self, group_id: str) -> bool:
        """Return whether a group is to be sampled after all others, one rollout at a time."""
        return self._losses[group_id] >= MIN_LOSSES

    def failure(self, assignment: Mapping[str, Any]) -> Failure | None:
        """Return why an assignment is not sampled any more; None where it is."""
        lone_losses = self._lone_losses.get(assignment["group_id"], Counter())
        if lone_losses[assignment["assignment_id"]] >= MAX_LONE_LOSSES:
            server = f"environment server {assignment['environment']!r}"
            text = (
                f"{server} died {MAX_LONE_LOSSES} times while this rollout alone was in flight; it is not tried again"
            )
            return Failure("infrastructure", "ServerLost", text)
        num_crashers = sum(count >= MAX_LONE_LOSSES for count in lone_losses.values())
        if num_crashers >= MAX_CRASHERS:
            text = (
                f"not tried: {num_crashers} other rollouts of its group took their environment server down, each alone"
            )
            return Failure("infrastructure", "ServerLost", text)
        return None
