"""Finds rollouts that crash their environment server, and whether the services that a rollout needs still live."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts
from tasks.inference.engine.scoring import Served
from tasks.inference.sampling.failures import Failure

LOOK_SECONDS = 1.0
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class UnderWay:
    """An assignment that is being sampled."""

    assignment_id: str
    group_id: str
    environment: str


class ServiceLost(ConnectionError):
    """The engine or an environment server is gone; `service` names it."""

    under_way: Sequence[UnderWay] = ()
    """What an environment server was at work on when it was lost; set by whoever knows."""

    def __init__(self, service: str, address: str, cause: str) -> None:
        super().__init__(
            f"{service} at {address} is gone ({cause}). Groups handed over before are complete; "
            "start it again and sample the missing groups"
        )
        self.service = service


def server(environment: str) -> str:
    """Return what the server of an environment is called."""
    return f"environment server {environment!r}"


class Watch:
    """Connects to the engines and the environment servers now and then.

    Connecting is enough and asks nothing of a busy server: the system accepts for it, and refuses once it is gone.
    """

    def __init__(self, engines: Sequence[Served], addresses: Mapping[str, str]) -> None:
        self.engines = {each.url.rstrip("/"): each.api_key for each in engines}
        """The key of each engine, by its URL."""
        self.addresses = addresses

    async def run(self) -> None:
        """Look every second until cancelled; raises ServiceLost."""
        while True:
            for url in self.engines:
                await self._connect("the engine", url)
            for name, address in self.addresses.items():
                await self._connect(server(name), address)
            await asyncio.sleep(LOOK_SECONDS)

    async def check(self) -> None:
        """Look at once, and ask each engine's API server whether the engine behind it lives; raises ServiceLost."""
        for url, api_key in self.engines.items():
            await self._ask(url, api_key)

    async def _ask(self, url: str, api_key: str) -> None:
        import httpx

        try:
            async with httpx.AsyncClient(timeout=CONNECT_SECONDS, trust_env=False) as client:
                headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
                answer = await client.get(f"{url}/health", headers=headers)
        except httpx.ConnectError as error:
            raise ServiceLost("the engine", url, str(error) or type(error).__name__) from error
        except httpx.TransportError:
            return  # slow is not gone: the rollout's own time limit decides
        if answer.status_code >= 500:
            raise ServiceLost("the engine", url, f"its server answers {answer.status_code}")

    async def _connect(self, service: str, address: str) -> None:
        parts = urlsplit(address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except TimeoutError:
            return
        except OSError as error:
            raise ServiceLost(service, address, error.strerror or str(error)) from error
        writer.close()


SUSPECT_AFTER = 2
"""Losses of its server during which a group was under way, from which on it is suspected."""
TRIED_MEMBERS = 2
"""Members of a group that may take the server down, each alone; what is left of the group is not tried."""


class Crashers:
    """Finds the rollouts that take their environment server down, so that they cost the others nothing.

    Groups that were under way at two losses of their server are sampled after all others, and of those one rollout at
    a time. One that is then alone when the server dies again is condemned: a row with an error, not tried again.
    """

    def __init__(self) -> None:
        self._losses = Counter[str]()
        self._alone = Counter[str]()
        self.condemned: dict[str, Failure] = {}
        """Why an assignment is not tried again, by its id."""

    def lost(self, service: str, under_way: Sequence[UnderWay], alone: bool = True) -> bool:
        """Count a loss of a server; `under_way` are the rollouts that it had. Tell whether one is condemned for it.

        `alone` says that nobody else sampled there: another step or an evaluation may have had rollouts under way too.
        """
        groups = {each.group_id for each in under_way}
        self._losses.update(groups)
        if not alone or len(under_way) != 1 or self._losses[under_way[0].group_id] < SUSPECT_AFTER:
            return False
        (only,) = under_way
        self._alone[only.group_id] += 1
        text = f"{service} died while this rollout alone was under way there; it is not tried again"
        self.condemned[only.assignment_id] = Failure("infrastructure", "ServerLost", text)
        return True

    def next(self, missing: pa.Table) -> tuple[pa.Table, bool]:
        """Return which of the missing assignments to sample next, and whether one at a time."""
        groups = list(dict.fromkeys(texts(missing["group_id"])))
        others = [group for group in groups if self._losses[group] < SUSPECT_AFTER]
        chosen = _of_groups(missing, others or groups[:1])
        return chosen, not others

    def untried(self, assignments: pa.Table) -> dict[str, Failure]:
        """Return why assignments are not tried: the condemned ones, and all of a group that has had its tries."""
        found = dict(self.condemned)
        for assignment, group in zip(texts(assignments["assignment_id"]), texts(assignments["group_id"]), strict=True):
            if self._alone[group] >= TRIED_MEMBERS and assignment not in found:
                text = (
                    f"{self._alone[group]} other rollouts of its group took their environment server down, each alone"
                )
                found[assignment] = Failure("infrastructure", "ServerLost", f"not tried: {text}")
        return found


def _of_groups(assignments: pa.Table, groups: Sequence[str]) -> pa.Table:
    return assignments.filter(pc.is_in(assignments["group_id"], value_set=pa.array(groups, pa.string())))
