"""Whether the services that a rollout needs are still there, told by connecting to them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tasks.inference.scoring import Served

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
