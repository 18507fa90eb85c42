"""Stopping: once enough groups of an environment have ended, its other rollouts are given up."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from tasks.inference.failures import STRAGGLER, Failure


class Stopped(Exception):
    """A rollout was given up because enough groups of its environment had ended."""


class Enough:
    """Counts the groups that ended, by environment, and stops what is left of an environment that has enough."""

    def __init__(self, wanted: Mapping[str, int]) -> None:
        """`wanted` says how many more groups of an environment are needed; one that is not there needs all."""
        self._wanted = dict(wanted)
        self._scopes: dict[str, set[asyncio.Timeout]] = {}

    def reached(self, environment: str) -> bool:
        """Tell whether enough groups of an environment have ended."""
        return self._wanted.get(environment, 1) <= 0

    def ended(self, environment: str) -> None:
        """Count a group all of whose members have ended, by themselves; stop the others where that is enough."""
        if environment in self._wanted:
            self._wanted[environment] -= 1
            if self.reached(environment):
                now = asyncio.get_running_loop().time()
                for scope in self._scopes.pop(environment, ()):
                    scope.reschedule(now)

    @asynccontextmanager
    async def unless_reached(self, environment: str) -> AsyncIterator[None]:
        """Run the body, and cancel it once its environment has enough; raises Stopped then, and if it had before."""
        if self.reached(environment):
            raise Stopped
        scope = asyncio.timeout(None)
        scopes = self._scopes.setdefault(environment, set())
        scopes.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise Stopped from error
        finally:
            scopes.discard(scope)


def straggler(environment: str, seconds: float | None) -> Failure:
    """Return why a rollout has no trace that was stopped after `seconds`, or before it was begun (None)."""
    when = "before it was begun" if seconds is None else f"after {seconds:.1f} s"
    text = f"stopped {when}: enough groups of environment {environment!r} had ended (assignment.oversampling)"
    return Failure(STRAGGLER, "Stopped", text)
