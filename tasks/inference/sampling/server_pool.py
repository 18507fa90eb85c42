"""ServerPool: the servers of each environment, and which of them has which rollout.

BatchSampler makes one for a batch and calls it in its event loop. A rollout is one request, an episode with all its
agents, and nothing is scored for a whole group: members of a group may be with different servers. Those of a lost
server are reassigned to its peers. Seeds belong to assignments, so tokens do not depend on the server.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.inference.sampling.lost_servers import InFlightRollout, ServerGone, ServiceLost, server_name
from tasks.inference.trace_rows.rows import Row

if TYPE_CHECKING:
    from verifiers.v1.episode import WireEpisode

    from tasks.inference.environments.connections import RolloutConnection

FOLLOW_SECONDS = 1.0
"""Between two looks which servers there are."""
FindServers = Callable[[Collection[str]], Mapping[str, Sequence[str]]]
"""Returns by environment the addresses of its servers that are there, given those that are known."""
Result = TypeVar("Result")

_log = logging.getLogger("stagecoach")


class GroupIsolated(Exception):
    """A group may have taken its environment servers down, and is not sampled beside others."""


class PoolSlot:
    """A rollout with the server that has it."""

    def __init__(self, pool: "ServerPool", rollout: InFlightRollout) -> None:
        self._pool = pool
        self._rollout = rollout
        pool.put(rollout)

    async def play(self, *request: Any) -> "WireEpisode":
        """Run the rollout: see `RolloutConnection.play`. Raises ServerGone once its server is lost."""
        return await self._pool.play(self._rollout, request)

    def move(self) -> None:
        """Move to another server of the environment, if it has others: this one may be at fault for what went wrong."""
        self.end()
        environment, present = self._rollout.environment, self._rollout.server
        self._rollout = replace(self._rollout, server=self._pool.choose(environment, but=present))
        self._pool.put(self._rollout)

    def end(self) -> None:
        """Note that the server has one rollout less."""
        self._pool.take(self._rollout)


class ServerPool:
    """The servers of each environment while a batch is sampled, and the rollouts that each has.

    `record_loss` is called with each server that is lost while its environment has others. `isolates` returns whether a
    group may have taken its servers down.
    """

    def __init__(
        self,
        addresses: Mapping[str, Sequence[str]],
        record_loss: Callable[[ServiceLost], None] = lambda lost: None,
        isolates: Callable[[str], bool] = lambda group_id: False,
    ) -> None:
        self.addresses = {environment: list(own) for environment, own in addresses.items()}
        """By environment, where those of its servers are that are there."""
        self.in_flight: dict[str, InFlightRollout] = {}
        """By assignment id."""
        self._record_loss = record_loss
        self._isolates = isolates
        self._loads = Counter[tuple[str, str]]()
        """By environment and address: rollouts in flight."""
        self._dealt = Counter[tuple[str, str]]()
        self._connections: dict[tuple[str, str], RolloutConnection] = {}
        """By environment and address, of servers that got rollouts."""
        self._lost: list[RolloutConnection] = []
        """Connections to servers that were lost: their requests are being cancelled."""
        self._playing = defaultdict[tuple[str, str], set[asyncio.Task[Any]]](set)
        """By environment and address, the requests in flight."""

    async def run(self, assignment: Row, play: Callable[[PoolSlot], Awaitable[Result]]) -> Result:
        """Let an assignment be played on the server that has fewest rollouts, and on others where that is lost.

        Raises what `play` raises, GroupIsolated where its group is not to be played beside others any more.
        """
        name, group_id, environment = (assignment[each] for each in ("assignment_id", "group_id", "environment"))
        while True:
            dealt = PoolSlot(self, InFlightRollout(name, group_id, environment, self.choose(environment)))
            try:
                result = await play(dealt)
            except ServerGone as gone:
                if self._isolates(group_id):
                    raise GroupIsolated from gone
                continue
            finally:
                dealt.end()
            # Not in a `finally`: one that is cancelled by the loss of a server stays in flight, for whoever is blamed.
            self.in_flight.pop(name, None)
            return result

    def choose(self, environment: str, but: str = "") -> str:
        """Return the server that has fewest rollouts, of several the one that had fewest so far.

        The one at the address `but` only where there is no other.
        """

        def load(address: str) -> tuple[bool, int, int]:
            return address == but, self._loads[environment, address], self._dealt[environment, address]

        return min(self.addresses[environment], key=load)

    def put(self, rollout: InFlightRollout) -> None:
        """Note that a server has a rollout."""
        self.in_flight[rollout.assignment_id] = rollout
        self._loads[rollout.environment, rollout.server] += 1
        self._dealt[rollout.environment, rollout.server] += 1

    def take(self, rollout: InFlightRollout) -> None:
        """Note that a server has a rollout less; it stays in flight."""
        self._loads[rollout.environment, rollout.server] -= 1

    async def play(self, rollout: InFlightRollout, request: Sequence[Any]) -> "WireEpisode":
        """Return the episode of a rollout; raises ServerGone where its server is lost, before or meanwhile."""
        if rollout.server not in self.addresses[rollout.environment]:
            raise ServerGone
        server = rollout.environment, rollout.server
        playing = asyncio.create_task(self._connection(server).play(*request))
        self._playing[server].add(playing)
        try:
            return await playing
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():  # the caller is cancelled, and not the request alone by `reassign`
                raise
            raise ServerGone from None
        finally:
            self._playing[server].discard(playing)

    def _connection(self, server: tuple[str, str]) -> "RolloutConnection":
        from tasks.inference.environments.connections import RolloutConnection  # it imports verifiers

        if server not in self._connections:
            self._connections[server] = RolloutConnection(server[1])
        return self._connections[server]

    def forget(self, groups: Collection[str]) -> None:
        """Note that some groups were stopped, by no loss of a server."""
        self.in_flight = {name: each for name, each in self.in_flight.items() if each.group_id not in groups}

    def in_flight_at(self, lost: ServiceLost) -> list[InFlightRollout]:
        """Return the rollouts that a lost server has."""
        every = self.in_flight.values()
        return [each for each in every if (each.environment, each.server) == (lost.environment, lost.address)]

    def reassign(self, lost: ServiceLost) -> bool:
        """Let the others take the rollouts of a lost server, and tell whether there are any."""
        own, there = self.addresses[lost.environment], self.in_flight_at(lost)
        if lost.address not in own:
            return True
        if len(own) == 1:
            return False
        own.remove(lost.address)
        lost.in_flight = there
        self._record_loss(lost)
        server = lost.environment, lost.address
        for playing in self._playing.pop(server, ()):
            playing.cancel()
        if server in self._connections:  # one that is started again at the address must not get what was queued
            self._lost.append(self._connections.pop(server))
        _log.warning(
            "%s at %s is gone (%s): its %d rollouts in flight are sampled again by the other %d, or last",
            *(lost.service, lost.address, lost.cause, len(there), len(own)),
        )
        return True

    async def follow(self, find: FindServers, lose: Callable[[ServiceLost], None]) -> None:
        """Take in servers that are there again, and tell `lose` of those that are not, until cancelled.

        `find` is called in a thread.
        """
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            known = {environment: set(own) for environment, own in self.addresses.items()}
            found = await asyncio.to_thread(find, {address for own in known.values() for address in own})
            for environment, before in known.items():
                now, there = self.addresses[environment], found[environment]
                # One that was lost while it was looked for comes with a later look.
                if new := [each for each in there if each not in before]:
                    _log.info("servers of environment %r at %s take rollouts from now on", environment, ", ".join(new))
                    now += new
                # A machine that is gone refuses no connection.
                for address in before.difference(there).intersection(now):
                    lose(ServiceLost(server_name(environment), address, "its process has ended", environment))

    async def close(self) -> None:
        """Close all connections."""
        for connection in [*self._connections.values(), *self._lost]:
            await connection.close()
