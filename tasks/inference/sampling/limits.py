"""SamplingPlan: when groups begin and stop. GroupQuota: stops those of an environment that has enough.

BatchSampler has one of each for a batch, on its event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import NamedTuple

import pyarrow as pa

from tasks.inference.engine.client import ServedModel
from tasks.inference.sampling.load_meter import LoadMeter
from tasks.inference.trace_rows.failures import STRAGGLER, Failure
from tasks.runtime.refs import Policy


class WeightUpdate(NamedTuple):
    """A newer policy that is served, with the assignments that may be begun with it."""

    policy: Policy
    served: ServedModel
    assignments: pa.Table


class SamplingPlan:
    """When groups begin and stop, and by which policies: here all are sampled to the end by one policy.

    The queue of a run has its own plan (`tasks.rollout.stage.QueueSampler`). Called in the sampler's event loop, but
    for `update_weights`, which is called in a thread.
    """

    weight_update = ""
    """For a newer policy: "wait" begins no further group, "abort" also drops those in flight, "keep" continues them."""
    versions: dict[str, int] | None = None
    """Versions, by key, of the policies whose tokens a rollout may have; a policy is added before it is served."""
    meter: LoadMeter | None = None
    """Measures rollouts in flight."""

    def __init__(self, num_groups: Mapping[str, int] = MappingProxyType({})) -> None:
        """`num_groups` says, by environment, after how many groups the others are stopped."""
        self.num_groups = num_groups

    def is_outdated(self) -> bool:
        """Return whether a newer policy exists, so that no further group begins."""
        return False

    def begin(self, group_id: str, versions: Collection[int]) -> int | None:
        """Mark a group as begun; `versions` are those of policies with kept turns of it.

        Returns the oldest version whose turns may be used; None for those of the policy itself alone.
        """
        return None

    def find_dropped(self, groups: Collection[str]) -> Collection[str]:
        """Return the groups that are to be stopped and to leave nothing."""
        return ()

    def update_weights(self) -> WeightUpdate | None:
        """Exchange the policy for the newest one under the rollouts in flight; None if that has to be tried again."""
        return None


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
