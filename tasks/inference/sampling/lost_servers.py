"""Watches the services that rollouts need, and finds the rollouts that crash their environment server."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from tasks.arrays.columns import texts
from tasks.inference.engine.client import SERVE_SECONDS, ServedModel
from tasks.inference.sampling.rollout_clock import RolloutClock
from tasks.inference.trace_rows.failures import Failure

if TYPE_CHECKING:
    import httpx

INTERVAL_SECONDS = 1.0
ASK_SECONDS = 2.0
"""Between two questions to each engine whether it gets on."""
SILENT_SECONDS = 15.0
"""An engine that leaves a question unanswered for so long is silent: its rollouts wait, and their time does not count.
It answers between two forward passes."""
CONNECT_SECONDS = 5.0
"""Longest wait for a connection or an answer; a service that is only slow is not lost."""
MIN_LOSSES = 2
"""Losses of its server with a group in flight after which the group may hold a crasher."""
MAX_TRIED_MEMBERS = 2
"""Members of a group that may crash the server, each alone, before the rest of the group is given up."""


@dataclass(frozen=True)
class InFlightRollout:
    """An assignment that is being sampled."""

    assignment_id: str
    group_id: str
    environment: str
    server: str = ""
    """The address of the environment's server that has it."""


class ServiceLost(ConnectionError):
    """The engine or an environment server is gone; `service` names it, and `environment` whose server it was."""

    in_flight: Sequence[InFlightRollout] = ()
    """The rollouts that an environment server had when it was lost; set by the BatchSampler."""

    def __init__(self, service: str, address: str, cause: str, environment: str = "") -> None:
        super().__init__(
            f"{service} at {address} is gone ({cause}). Groups handed over before are complete; "
            "start it again and sample the missing groups"
        )
        self.service, self.address, self.cause, self.environment = service, address, cause, environment


class ServerGone(ConnectionError):
    """The server of a rollout is gone, and its environment has others."""


def server_name(environment: str) -> str:
    """Return the name of an environment's server in errors and logs, whichever of several."""
    return f"environment server {environment!r}"


_log = logging.getLogger("stagecoach")


class ServiceWatch:
    """Connects to the engines and the environment servers every second, and asks engines whether they get on.

    A connection costs a busy server nothing: the operating system accepts for it, and refuses once its process is gone.
    `survive` is called with each that is gone, and returns whether others are left that take its part. An engine that
    lives and answers nothing is silent: whoever started it restarts it, and it is lost then. One that nobody restarts
    is lost after `silent_seconds`.
    """

    def __init__(
        self,
        engines: Sequence[ServedModel],
        addresses: Mapping[str, Sequence[str]],
        survive: Callable[[ServiceLost], bool] = lambda lost: False,
        silent_seconds: float = SERVE_SECONDS,
    ) -> None:
        self.clock = RolloutClock()
        self.silent_seconds = silent_seconds
        self._ask_now = asyncio.Event()
        self._asked = asyncio.Event()
        """Set when all engines have been asked once more, and replaced by another then."""
        self.engines = dict[str, str]()
        """The API key of each engine, by URL."""
        self.addresses = addresses
        """Where the servers of each environment are by now, by environment."""
        self.survive = survive
        self.add(engines)

    def add(self, engines: Sequence[ServedModel]) -> None:
        """Watch further engines, too: all replicas of each."""
        self.engines |= {url.rstrip("/"): each.api_key for each in engines for url in each.urls}

    async def run(self) -> None:
        """Connect to all services every second until cancelled; raises ServiceLost."""
        while True:
            every = [("the engine", url, "") for url in self.engines]
            every += [(server_name(name), each, name) for name, own in self.addresses.items() for each in own]
            # Side by side: one of dozens may be slow.
            ends = await asyncio.gather(*(self._connect(*each) for each in every), return_exceptions=True)
            for error in filter(None, ends):
                raise error
            await asyncio.sleep(INTERVAL_SECONDS)

    async def follow_engines(self) -> None:
        """Ask every engine whether it gets on, again and again until cancelled; raises ServiceLost."""
        async with AsyncExitStack() as stack:
            clients: dict[str, httpx.AsyncClient] = {}
            while True:
                self._ask_now.clear()
                for url, api_key in self.engines.items():
                    if url not in clients:
                        clients[url] = await stack.enter_async_context(_client(url, api_key))
                asked = [self._ask_engine(url, clients[url]) for url in self.engines]
                for error in filter(None, await asyncio.gather(*asked, return_exceptions=True)):
                    raise error
                self._asked.set()
                self._asked = asyncio.Event()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ask_now.wait(), ASK_SECONDS)

    async def engines_answer(self) -> bool:
        """Tell whether all engines answer a question that is asked from now on; needs `follow_engines`.

        Raises nothing: the loss of an engine ends the sampling.
        """
        for _ in range(2):  # the round that is under way may have begun before
            self._ask_now.set()
            await self._asked.wait()
        return not any(map(self.clock.is_silent, self.engines))

    async def wait_for_engines(self) -> None:
        """Wait until all engines answer; the loss of one ends the sampling of its rollouts meanwhile."""
        while not await self.engines_answer():
            pass

    def lose(self, lost: ServiceLost) -> None:
        """Watch a service no more that is gone; raises the loss unless others are left that take its part."""
        if not self.survive(lost):
            raise lost
        self.engines.pop(lost.address, None)
        self.clock.note_answer(lost.address)

    async def _ask_engine(self, url: str, client: "httpx.AsyncClient") -> None:
        """Ask the API server whether the engine behind it lives, and that engine whether it gets on."""
        import httpx

        try:
            # The API server outlives an engine that died; its port alone would say that all is well.
            if (health := await client.get("/health")).status_code >= 500:
                if self.clock.is_silent(url):
                    return self.lose(ServiceLost("the engine", url, f"its server answers {health.status_code}"))
                return self._note_silence(url, 0.0)  # a proxy before an engine of others may say so once
            await client.get("/is_sleeping")  # an engine of others has no such route, and that is an answer, too
        except httpx.TimeoutException:
            self._note_silence(url, SILENT_SECONDS)
        except httpx.ConnectError as error:
            self.lose(ServiceLost("the engine", url, str(error) or type(error).__name__))
        except httpx.TransportError:
            self._note_silence(url, 0.0)  # it may be about to go, which the next connection says
        else:
            if self.clock.is_silent(url):
                _log.warning("the engine at %s answers again", url)
            self.clock.note_answer(url)

    def _note_silence(self, url: str, question_seconds: float) -> None:
        was_silent = self.clock.is_silent(url)
        seconds = self.clock.note_silence(url, question_seconds)
        if question_seconds and not was_silent:
            _log.warning("the engine at %s has not answered for %.0f s: rollouts wait for it, untimed", url, seconds)
        if seconds > self.silent_seconds:
            self.lose(ServiceLost("the engine", url, f"it has not answered for {seconds:.0f} s"))

    async def _connect(self, service: str, address: str, environment: str) -> None:
        parts = urlsplit(address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(parts.hostname, port)
        except TimeoutError:
            return  # a full backlog or a slow network is no loss
        except OSError as error:
            self.lose(ServiceLost(service, address, error.strerror or str(error), environment))
            return
        writer.close()


def _client(url: str, api_key: str) -> "httpx.AsyncClient":
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # Reading certificates takes longer than most requests.
    secure = url.startswith("https")
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=SILENT_SECONDS, trust_env=False, verify=secure)


class Crashers:
    """Finds the rollouts that crash their environment server, so that they cost the other rollouts nothing.

    Groups that were in flight at MIN_LOSSES losses of their server are sampled after all others, one rollout at a time.
    A rollout that is then alone when the server dies again is given up: a row with an error, not sampled again.
    """

    def __init__(self) -> None:
        self._losses = Counter[str]()
        """By group: losses of the server while it was in flight."""
        self._losses_alone = Counter[str]()
        """By group: losses of the server while one member of it alone was in flight."""
        self._given_up: dict[str, Failure] = {}
        """By assignment id."""

    def record_loss(self, service: str, in_flight: Sequence[InFlightRollout], alone: bool = True) -> bool:
        """Count a loss of a server with the rollouts that it had; tell whether one of them is given up for it.

        `alone` says that nobody else sampled there: another step or an evaluation may have had rollouts in flight too.
        """
        groups = {each.group_id for each in in_flight}
        # Counted also where others sampled there: the group was in flight, and a loss or two by accident only delay it.
        self._losses.update(groups)
        if not alone or len(in_flight) != 1 or self._losses[in_flight[0].group_id] < MIN_LOSSES:
            return False
        (only,) = in_flight
        self._losses_alone[only.group_id] += 1
        text = f"{service} died while this rollout alone was under way there; it is not tried again"
        self._given_up[only.assignment_id] = Failure("infrastructure", "ServerLost", text)
        return True

    def find_suspected(self, groups: Collection[str]) -> set[str]:
        """Return those of some groups that are not to be sampled beside others any more."""
        return {group for group in groups if self._losses[group] >= MIN_LOSSES}

    def next_assignments(self, missing: pa.Table) -> tuple[pa.Table, bool]:
        """Return which of the missing assignments to sample next, and whether one at a time."""
        groups = list(dict.fromkeys(texts(missing["group_id"])))
        suspected = self.find_suspected(groups)
        harmless = [group for group in groups if group not in suspected]
        # One suspected group at a time: a loss then says which group it was.
        chosen = pa.array(harmless or groups[:1], pa.string())
        return missing.filter(pc.is_in(missing["group_id"], value_set=chosen)), not harmless

    def find_given_up(self, assignments: pa.Table) -> dict[str, Failure]:
        """Return the failures of assignments that are not to be sampled, by id.

        Those are the ones that crashed their server, and all others of a group in which MAX_TRIED_MEMBERS did.
        """
        failures = dict(self._given_up)
        for assignment, group in zip(texts(assignments["assignment_id"]), texts(assignments["group_id"]), strict=True):
            if self._losses_alone[group] >= MAX_TRIED_MEMBERS and assignment not in failures:
                crashed = f"{self._losses_alone[group]} other rollouts of its group"
                text = f"not tried: {crashed} took their environment server down, each alone"
                failures[assignment] = Failure("infrastructure", "ServerLost", text)
        return failures
