"""GroupQuota: stops the rollouts of an environment once enough of its groups have ended.

BatchSampler makes one for a batch, on its event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tasks.inference.trace_rows.failures import STRAGGLER, Failure


class StoppedEarly(Exception):
    """A rollout was stopped because enough groups of its environment had ended."""


class GroupQuota:
    """Counts the groups that ended, by environment, and stops the other rollouts of an environment that has enough."""

    def __init__(self, num_groups: Mapping[str, int]) -> None:
        """`num_groups` says how many more groups of an environment are needed; one without a number needs all."""
        self._num_needed = dict(num_groups)
        self._scopes: dict[str, set[asyncio.Timeout]] = {}

    def is_reached(self, environment: str) -> bool:
        """Tell whether enough groups of an environment have ended."""
        return self._num_needed.get(environment, 1) <= 0

    def count_group(self, environment: str) -> None:
        """Count a group whose members all ended by themselves; stop the environment's others once there are enough."""
        if environment in self._num_needed:
            self._num_needed[environment] -= 1
            if self.is_reached(environment):
                now = asyncio.get_running_loop().time()
                for scope in self._scopes.pop(environment, ()):
                    scope.reschedule(now)

    @asynccontextmanager
    async def stop_when_reached(self, environment: str) -> AsyncIterator[None]:
        """Run the body, and cancel it once its environment has enough groups.

        Raises StoppedEarly then, and before the body where there were enough already.
        """
        if self.is_reached(environment):
            raise StoppedEarly
        # A time limit without a time: moving it to now cancels the body, and asyncio tells it from other cancellations.
        scope = asyncio.timeout(None)
        scopes = self._scopes.setdefault(environment, set())
        scopes.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise StoppedEarly from error
        finally:
            scopes.discard(scope)


def straggler_failure(environment: str, seconds: float | None) -> Failure:
    """Return the failure of a rollout that was stopped after `seconds`, or before it began (None)."""
    when = "before it was begun" if seconds is None else f"after {seconds:.1f} s"
    text = f"stopped {when}: enough groups of environment {environment!r} had ended (assignment.oversampling)"
    return Failure(STRAGGLER, "Stopped", text)
