"""ServiceWatch: notices the loss of an engine or an environment server that rollouts need.

BatchSampler makes one for a batch and runs it in its event loop; RolloutRunner waits there for engines that do not
answer. ServerPool decides whether the others can do the work of a lost server.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from itertools import starmap
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tasks.inference.engine.client import OF_POLICY, SERVE_SECONDS, ServedModel, client_options
from tasks.inference.sampling.crash_isolation import InFlightRollout
from tasks.inference.sampling.rollout_clock import RolloutClock

if TYPE_CHECKING:
    import httpx

INTERVAL_SECONDS = 1.0
ASK_SECONDS = 2.0
"""Between two requests to each engine that it answers between two forward passes."""
SILENT_SECONDS = 15.0
"""An engine that leaves a request unanswered for so long is silent: rollouts wait for it, and their clock stands."""
CONNECT_SECONDS = 5.0
"""Longest wait for a connection or an answer; a service that is only slow is not lost."""


class ServiceLost(ConnectionError):
    """The engine, or a server of `environment`, is gone; `service` names it in words."""

    in_flight: Sequence[InFlightRollout] = ()
    """The rollouts that it had when it was lost; set by the ServerPool."""
    is_isolated = False
    """Whether a single isolated rollout may have caused it; set by the ServerPool."""

    def __init__(self, address: str, cause: str, environment: str = OF_POLICY) -> None:
        self.service = f"environment server {environment!r}" if environment else "the engine"
        super().__init__(
            f"{self.service} at {address} is gone ({cause}). Groups handed over before are complete; "
            "start it again and sample the missing groups"
        )
        self.address, self.cause, self.environment = address, cause, environment


_log = logging.getLogger("stagecoach")


class ServiceWatch:
    """Connects to the environment servers every second, and asks the engines for an answer.

    A connection costs a busy server nothing: the operating system accepts for it, and refuses once its process is gone.
    `reassign` is called with each lost service, and returns whether others take its rollouts; `addresses` are the
    environment servers, kept up to date by the caller. An engine that lives and answers nothing is silent: the process
    that started it restarts it, and it is lost then. An external engine is lost after `silent_seconds`.
    """

    def __init__(
        self,
        engines: Iterable[ServedModel],
        addresses: Mapping[str, Sequence[str]],
        reassign: Callable[[ServiceLost], bool] = lambda lost: False,
        silent_seconds: float = SERVE_SECONDS,
    ) -> None:
        self.clock = RolloutClock()
        self._silent_seconds = silent_seconds
        self._ask_now, self._asked = asyncio.Event(), asyncio.Event()
        """`_asked` is set when all engines were asked once more, and replaced by another then."""
        self.engines = {url.rstrip("/"): engine.api_key for engine in engines for url in engine.urls}
        """The API key of each engine, all replicas among them, by URL."""
        self._addresses, self._reassign = addresses, reassign
        self._lost: ServiceLost | None = None

    async def run(self) -> None:
        """Connect to all environment servers every second until cancelled; raises ServiceLost."""
        while True:
            servers = [
                (name, address) for name, of_name in self._addresses.items() if name != OF_POLICY for address in of_name
            ]
            # In parallel: one of dozens may be slow.
            await asyncio.gather(*starmap(self._connect, servers))
            await asyncio.sleep(INTERVAL_SECONDS)

    async def follow_engines(self) -> None:
        """Ask every engine for an answer, again and again until cancelled; raises ServiceLost."""
        import httpx

        async with AsyncExitStack() as stack:
            clients: dict[str, httpx.AsyncClient] = {}
            while True:
                self._ask_now.clear()
                for url in self.engines.keys() - clients:
                    client = httpx.AsyncClient(**client_options(url, self.engines[url], SILENT_SECONDS))
                    clients[url] = await stack.enter_async_context(client)
                await asyncio.gather(*(self._ask_engine(url, clients[url]) for url in self.engines))
                self._asked.set()
                self._asked = asyncio.Event()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ask_now.wait(), ASK_SECONDS)

    async def engines_answer(self) -> bool:
        """Return whether all engines answer a request that is sent from now on; needs `follow_engines`.

        Raises nothing: the loss of an engine ends the sampling.
        """
        for _ in range(2):  # the round that is running may have begun before
            self._ask_now.set()
            await self._asked.wait()
        return not any(map(self.clock.is_silent, self.engines))

    async def wait_for_engines(self) -> None:
        """Wait until all engines answer; the loss of one ends the sampling of its rollouts meanwhile."""
        while not await self.engines_answer():
            pass

    def lose(self, lost: ServiceLost) -> None:
        """Stop watching a lost service; raises the loss unless others take its rollouts. A second report is ignored."""
        if lost.address not in (self._addresses[lost.environment] if lost.environment else self.engines):
            return
        if self._lost or not self._reassign(lost):
            self._lost = self._lost or lost
            raise self._lost
        self.forget(lost.address)

    def forget(self, url: str) -> None:
        """Watch an engine no more."""
        self.engines.pop(url, None)
        self.clock.note_answer(url)

    async def _ask_engine(self, url: str, client: "httpx.AsyncClient") -> None:
        """Ask the API server whether the engine behind it lives, and that engine whether it gets on."""
        import httpx

        try:
            # The API server outlives an engine that died; its port alone would say that all is well.
            if (health := await client.get("/health")).status_code >= 500:
                if self.clock.is_silent(url):
                    return self.lose(ServiceLost(url, f"its server answers {health.status_code}"))
                return self._note_silence(url, 0.0)  # a proxy before an external engine may say so once
            await client.get("/is_sleeping")  # an external engine has no such route, and that is an answer, too
        except httpx.TimeoutException:
            self._note_silence(url, SILENT_SECONDS)
        except httpx.ConnectError as error:
            self.lose(ServiceLost(url, str(error) or type(error).__name__))
        except httpx.TransportError:
            self._note_silence(url, 0.0)  # it may be about to go, which the next connection says
        else:
            if self.clock.is_silent(url):
                _log.warning("the engine at %s answers again", url)
            self.clock.note_answer(url)

    def _note_silence(self, url: str, question_seconds: float) -> None:
        if url not in self.engines:  # lost meanwhile: the clock must not wait for its answer
            return
        was_silent = self.clock.is_silent(url)
        seconds = self.clock.note_silence(url, question_seconds)
        if question_seconds and not was_silent:
            _log.warning("the engine at %s has not answered for %.0f s: rollouts wait for it, untimed", url, seconds)
        if seconds > self._silent_seconds:
            self.lose(ServiceLost(url, f"it has not answered for {seconds:.0f} s"))

    async def _connect(self, environment: str, address: str) -> None:
        parts = urlsplit(address)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        except TimeoutError:
            return  # a full backlog or a slow network is no loss
        except OSError as error:
            self.lose(ServiceLost(address, error.strerror or str(error), environment))
            return
        writer.close()
