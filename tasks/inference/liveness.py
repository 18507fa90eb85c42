"""Whether the services that a rollout needs are still there, told by connecting to them."""

import asyncio
from collections.abc import Mapping
from urllib.parse import urlsplit

LOOK_SECONDS = 1.0
CONNECT_SECONDS = 5.0


class ServiceLost(ConnectionError):
    """The engine or an environment server is gone; `service` names it."""

    def __init__(self, service: str, address: str, cause: str) -> None:
        super().__init__(
            f"{service} at {address} is gone ({cause}). Groups handed over before are complete; "
            "start it again and sample the missing groups"
        )
        self.service = service


class Watch:
    """Connects to the engine and the environment servers now and then.

    Connecting is enough and asks nothing of a busy server: the system accepts for it, and refuses once it is gone.
    """

    def __init__(self, engine_url: str, api_key: str, addresses: Mapping[str, str]) -> None:
        self.engine_url = engine_url.rstrip("/")
        self.api_key = api_key
        self.addresses = addresses

    async def run(self) -> None:
        """Look every second until cancelled; raises ServiceLost."""
        while True:
            await self._connect("the engine", self.engine_url)
            for name, address in self.addresses.items():
                await self._connect(f"environment server {name!r}", address)
            await asyncio.sleep(LOOK_SECONDS)

    async def check(self) -> None:
        """Look at once, and ask the engine's API server whether the engine behind it lives; raises ServiceLost."""
        import httpx

        try:
            async with httpx.AsyncClient(timeout=CONNECT_SECONDS, trust_env=False) as client:
                headers = {"Authorization": f"Bearer {self.api_key}"}
                answer = await client.get(f"{self.engine_url}/health", headers=headers)
        except httpx.ConnectError as error:
            raise ServiceLost("the engine", self.engine_url, str(error) or type(error).__name__) from error
        except httpx.TransportError:
            return  # slow is not gone: the rollout's own time limit decides
        if answer.status_code >= 500:
            raise ServiceLost("the engine", self.engine_url, f"its server answers {answer.status_code}")

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
