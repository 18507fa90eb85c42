"""Deals rollouts to the servers of their environment, and those of a lost server again to the others.

A rollout is one request, an episode with all its agents, and nothing is scored for a whole group: so members of a group
may be with different servers. Seeds belong to assignments, so that whoever takes them tokens are the same.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from tasks.inference.sampling.lost_servers import InFlightRollout, ServerGone, ServiceLost, server_name
from tasks.inference.trace_rows.rows import Row

if TYPE_CHECKING:
    from tasks.inference.sampling.rollout_client import RolloutClient

FOLLOW_SECONDS = 1.0
"""Between two looks which servers there are."""
FindServers = Callable[[Collection[str]], Mapping[str, Sequence[str]]]
"""Returns by environment the addresses of its servers that are there, given those that are known."""
Result = TypeVar("Result")

_log = logging.getLogger("stagecoach")


class GroupSetAside(Exception):
    """A group may have taken its environment servers down, and is not sampled beside others."""


class DealtRollout:
    """A rollout with the server that has it."""

    def __init__(self, dealer: "RolloutDealer", rollout: InFlightRollout) -> None:
        self._dealer = dealer
        self._rollout = rollout
        dealer.put(rollout)

    @property
    def client(self) -> "RolloutClient":
        """The connection to the server."""
        return self._dealer.client_of(self._rollout)

    def move(self) -> None:
        """Move to another server of the environment, if it has others: this one may be at fault for what went wrong."""
        self.end()
        own, present = self._rollout.environment, self._rollout.server
        self._rollout = replace(self._rollout, server=self._dealer.choose(own, but=present))
        self._dealer.put(self._rollout)

    def end(self) -> None:
        """Note that the server has one rollout less."""
        self._dealer.take(self._rollout)


class RolloutDealer:
    """The servers of each environment while a batch is sampled, and the rollouts that each has.

    `record_loss` is called with each server that is lost while its environment has others, and returns the groups that
    are not to be sampled beside others any more. With `one_at_a_time`, the server of the only rollout has no others.
    """

    def __init__(
        self,
        addresses: Mapping[str, Sequence[str]],
        record_loss: Callable[[ServiceLost], Collection[str]] = lambda lost: (),
        one_at_a_time: bool = False,
    ) -> None:
        self.addresses = {environment: list(own) for environment, own in addresses.items()}
        """By environment, where those of its servers are that are there."""
        self.in_flight: dict[str, InFlightRollout] = {}
        """By assignment id."""
        self._record_loss = record_loss
        self._one_at_a_time = one_at_a_time
        self._loads = Counter[tuple[str, str]]()
        """By environment and address: rollouts in flight."""
        self._dealt = Counter[tuple[str, str]]()
        self._clients: dict[tuple[str, str], RolloutClient] = {}
        """Of servers that were dealt rollouts."""
        self._set_aside: set[str] = set()

    async def run(self, assignment: Row, play: Callable[[DealtRollout], Awaitable[Result]]) -> Result:
        """Let an assignment be played on the server that has fewest rollouts, and on others where that is lost.

        Raises what `play` raises, GroupSetAside where its group is not to be played beside others any more.
        """
        name, group_id, environment = (assignment[each] for each in ("assignment_id", "group_id", "environment"))
        while True:
            dealt = DealtRollout(self, InFlightRollout(name, group_id, environment, self.choose(environment)))
            try:
                result = await play(dealt)
            except ServerGone as gone:
                if group_id in self._set_aside:
                    raise GroupSetAside from gone
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

    def client_of(self, rollout: InFlightRollout) -> "RolloutClient":
        """Return the connection to the server of a rollout; raises ServerGone where that is lost."""
        if rollout.server not in self.addresses[rollout.environment]:
            raise ServerGone
        return self._client((rollout.environment, rollout.server))

    def _client(self, server: tuple[str, str]) -> "RolloutClient":
        from tasks.inference.sampling.rollout_client import RolloutClient  # it imports verifiers

        if server not in self._clients:
            self._clients[server] = RolloutClient(server[1])
        return self._clients[server]

    def forget(self, groups: Collection[str]) -> None:
        """Note that some groups were stopped, by no loss of a server."""
        self.in_flight = {name: each for name, each in self.in_flight.items() if each.group_id not in groups}

    def in_flight_at(self, lost: ServiceLost) -> list[InFlightRollout]:
        """Return the rollouts that a lost server has."""
        every = self.in_flight.values()
        return [each for each in every if (each.environment, each.server) == (lost.environment, lost.address)]

    def survive(self, lost: ServiceLost) -> bool:
        """Let the others take the rollouts of a lost server, and tell whether there are any."""
        own, there = self.addresses[lost.environment], self.in_flight_at(lost)
        if lost.address not in own:
            return True
        # A rollout that is alone is found out by who samples one at a time.
        if len(own) == 1 or (self._one_at_a_time and there):
            return False
        own.remove(lost.address)
        lost.in_flight = there
        self._set_aside.update(self._record_loss(lost))
        if client := self._clients.pop((lost.environment, lost.address), None):
            client.abandon()
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

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()
