"""ServerPool: the environment servers and engine replicas of a batch, and which of them has which rollout.

BatchSampler makes one for a batch and calls it in its event loop; ServiceWatch tells it of losses. A rollout is one
request to an environment server, an episode with all its agents; nothing is scored for a whole group, so members of a
group may be at different servers. They share a replica of the engine, which shares the states of their prompt. Rollouts
of a lost server or replica are played again at others. A replica that is to leave keeps the rollouts that it has.
Seeds belong to assignments, so tokens depend on neither.
A rollout that may have crashed its servers (CrashIsolation) is played alone, after all others.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tasks.inference.engine.client import OF_POLICY
from tasks.inference.sampling.crash_isolation import CrashIsolation, InFlightRollout
from tasks.inference.sampling.lost_servers import ServiceLost, ServiceWatch
from tasks.inference.trace_rows.failures import Failure
from tasks.inference.trace_rows.rows import Row

if TYPE_CHECKING:
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.serve.client import EnvClient

MIN_FREE = 0.01
"""Of a KV cache: a full one gets rollouts last."""
FOLLOW_SECONDS = 1.0
"""Between two looks for servers that were started again."""
FindServers = Callable[[Collection[str]], Mapping[str, Collection[str]]]
"""Returns the addresses of running servers by environment, or of engines; those of the argument are not probed."""
ReplicaLoad = Callable[[str], tuple[float, float]]
"""Returns what an engine says of itself: its requests, and the used share of its KV cache."""
Result = TypeVar("Result")

_log = logging.getLogger("stagecoach")


class ServerGone(ConnectionError):
    """The server or the replica of a rollout is lost, and others can play it."""


class CrashesServers(Exception):
    """A rollout is not played again, because it or others of its group have crashed their servers."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ServerPool:
    """Servers by environment and replicas of the policy's engine, with the rollouts in flight at each.

    Without `spares_replicas` the loss of a replica is the loss of the engine, and so is one that leaves fewer than
    `least`.
    """

    def __init__(
        self,
        addresses: Mapping[str, Sequence[str]],
        isolation: CrashIsolation,
        replicas: Sequence[str] = (),
        spares_replicas: bool = True,
        least: int = 1,
        load: ReplicaLoad | None = None,
    ) -> None:
        self.addresses = {name: list(of_name) for name, of_name in {**addresses, OF_POLICY: replicas}.items()}
        """Servers that rollouts may go to, by environment; replicas of the policy's engine under OF_POLICY."""
        self.in_flight: dict[str, InFlightRollout] = {}
        """By assignment id."""
        self.num_placed = Counter[tuple[str, str]]()
        """Rollouts that each server has got so far, by environment and address."""
        self.isolation = isolation
        self._spares_replicas, self._least, self._load = spares_replicas, least, load
        self._leaving = set[str]()
        """Replicas that get no more rollouts, until those that they have are ended."""
        self._replica_of: dict[str, str] = {}
        """By group in flight."""
        self._others = set[str]()
        """Rollouts that are not isolated, in flight or waiting, by assignment id."""
        self._alone = asyncio.Lock()
        """Held by the isolated rollout that is next or in flight."""
        self._woken = asyncio.Event()
        """Set when an isolated rollout ends or no other one is left, and replaced by another then."""
        self._connections: dict[tuple[str, str], EnvClient] = {}
        self._closing: list[EnvClient] = []
        """Connections to lost servers, whose requests are being cancelled."""
        self._requests = defaultdict[tuple[str, str], set[asyncio.Task[Any]]](set)
        """Requests in flight, by environment and server, and by OF_POLICY and replica."""

    async def run(
        self, assignment: Row, limiter: asyncio.Semaphore, play: Callable[[InFlightRollout], Awaitable[Result]]
    ) -> Result:
        """Play an assignment at the server with the fewest rollouts, and at others if that is lost.

        It waits until `limiter` admits it; one that is isolated waits first until no other is in flight or waits.
        Raises what `play` raises, and CrashesServers.
        """
        name = assignment["assignment_id"]
        if not self.isolation.isolates(name):
            self._others.add(name)
            try:
                async with limiter:
                    with suppress(ServerGone):
                        return await self._run_admitted(assignment, play)
            finally:
                self._others.discard(name)
                if not self._others:
                    self._wake()
        # One plays to its end before the next: a deadly group must not take a server down with each of its members.
        async with self._alone:
            await asyncio.sleep(0)  # rollouts whose tasks begin in this turn of the loop come first
            while True:
                while self._others:
                    await self._woken.wait()
                async with limiter:
                    with suppress(ServerGone):
                        return await self._run_admitted(assignment, play)

    async def _run_admitted(self, assignment: Row, play: Callable[[InFlightRollout], Awaitable[Result]]) -> Result:
        """Play an assignment as `run` does; raises ServerGone for one that is isolated after the loss."""
        name, group_id, environment = (assignment[key] for key in ("assignment_id", "group_id", "environment"))
        while True:
            while any(each.is_isolated for each in self.in_flight.values()):
                await self._woken.wait()
            if failure := self.isolation.failure(assignment):
                raise CrashesServers(failure)
            rollout = InFlightRollout(name, group_id, environment, is_isolated=name not in self._others)
            rollout.replica = self._replica(group_id)
            self.in_flight[name] = rollout
            self.move(rollout)
            try:
                return await play(rollout)
            except ServerGone:
                if self.isolation.isolates(name):
                    raise
            finally:
                del self.in_flight[name]
                if rollout.is_isolated:
                    self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._woken = asyncio.Event()

    def move(self, rollout: InFlightRollout) -> None:
        """Place a rollout at the server with the fewest rollouts, of several at the one that had fewest so far.

        A server that it had before, which may be at fault for a failure, is taken only if there is no other.
        """
        environment, before = rollout.environment, rollout.server
        loads = Counter((each.environment, each.server) for each in self.in_flight.values())

        def load(address: str) -> tuple[bool, int, int]:
            return address == before, loads[environment, address], self.num_placed[environment, address]

        rollout.server = min(self.addresses[environment], key=load)
        self.num_placed[environment, rollout.server] += 1

    def _replica(self, group_id: str) -> str:
        """Return the replica of a group; a new one goes where fewest requests share the free part of the KV cache."""
        replicas = self.addresses[OF_POLICY]
        if self._replica_of.get(group_id) not in replicas:
            in_flight = Counter(rollout.replica for rollout in self.in_flight.values())

            def load(url: str) -> float:
                requests, used = self._load(url) if self._load else (0, 0)  # of a moment ago, those of other runs too
                return (max(requests, in_flight[url]) + 1) / max(1 - used, MIN_FREE)

            self._replica_of[group_id] = min(replicas, key=load, default="")
        return self._replica_of[group_id]

    def finish(self, group_id: str) -> None:
        """Forget the replica of a group without rollouts in flight."""
        self._replica_of.pop(group_id, None)

    async def play(self, rollout: InFlightRollout, *request: Any) -> "WireEpisode":
        """Return the episode of a rollout; arguments as of verifiers' `EnvClient.run`.

        Where the caller is cancelled, the server is asked to stop the rollout. Raises ServerGone if the server is lost,
        RuntimeError with the server's error, its type in front.
        """
        self.require_present(rollout)
        places = rollout.places
        playing = asyncio.create_task(self._connection(places[0]).run(*request))
        for place in places:
            self._requests[place].add(playing)
        try:
            return await playing
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():  # the caller is cancelled, and not the request alone by `reassign`
                raise
            raise ServerGone from None
        finally:
            for place in places:
                self._requests[place].discard(playing)

    def require_present(self, rollout: InFlightRollout) -> None:
        """Raise ServerGone where the server or the replica of a rollout takes no more requests."""
        if any(address not in self.addresses[name] for name, address in rollout.places if address):
            raise ServerGone

    def _connection(self, server: tuple[str, str]) -> "EnvClient":
        from tasks.inference.environments.connections import connect  # it imports verifiers

        if server not in self._connections:
            self._connections[server] = connect(server[1])
        return self._connections[server]

    def reassign(self, lost: ServiceLost) -> bool:
        """Move the rollouts of a lost server or replica to its peers; return False if there are none.

        Counts the loss of a server for its rollouts in flight.
        """
        lost.in_flight = [
            rollout for rollout in self.in_flight.values() if (lost.environment, lost.address) in rollout.places
        ]
        if lost.environment:
            lost.is_isolated = self.isolation.record(lost.in_flight)
        peers, place = self.addresses[lost.environment], (lost.environment, lost.address)
        others = [address for address in peers if address != lost.address]
        is_spared = len(others) >= (1 if lost.environment else self._least)
        if not lost.environment:
            is_spared = is_spared and self._spares_replicas
        if not is_spared or lost.address not in {*peers, *self._leaving}:
            return False
        peers[:] = others
        for request in self._requests.pop(place, ()):
            request.cancel()
        if place in self._connections:  # a server that is started again at the address must not get queued requests
            self._closing.append(self._connections.pop(place))
        _log.warning(
            "%s at %s is gone (%s): its %d rollouts in flight are sampled again by the other %d%s",
            *(lost.service, lost.address, lost.cause, len(lost.in_flight), len(others)),
            ", or last if they may have crashed it" if lost.environment else "",
        )
        return True

    async def follow(self, find: FindServers, watch: ServiceWatch) -> None:
        """Add servers and replicas that are new or started again, until cancelled; `find` is called in a thread.

        Servers that are gone are lost. Replicas that are gone are to leave: they get no further rollouts, and are
        watched as long as they have some. The last ones stay, as many as there must be.
        """
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            before = {name: {*of_name} for name, of_name in self.addresses.items()}
            present = await asyncio.to_thread(find, self._leaving.union(*before.values()))
            for name in before.keys() & present.keys():
                here, there = self.addresses[name], present[name]
                # One that was lost while it was looked for is in `before`, and is added after a later look.
                if new := [address for address in there if address not in before[name]]:
                    _log.info("%s at %s: rollouts go there from now on", name or "the engine", ", ".join(new))
                    here += new
                gone = before[name].difference(there).intersection(here)
                if name == OF_POLICY:
                    self._follow_replicas(new, gone, watch)
                else:  # a machine that is gone refuses no connection
                    for address in gone:
                        watch.lose(ServiceLost(address, "its process has ended", name))

    def _follow_replicas(self, new: Collection[str], gone: Collection[str], watch: ServiceWatch) -> None:
        here = self.addresses[OF_POLICY]
        watch.engines |= dict.fromkeys(new, watch.engines[here[0]])
        self._leaving.difference_update(new)
        for url in gone:
            if len(here) > self._least:
                here.remove(url)
                self._leaving.add(url)
        for url in self._leaving.difference(rollout.replica for rollout in self.in_flight.values()):
            self._leaving.remove(url)
            watch.forget(url)

    async def close(self) -> None:
        """Close all connections."""
        for connection in [*self._connections.values(), *self._closing]:
            await connection.close()
