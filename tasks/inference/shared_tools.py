"""Shared tool servers: watched by whoever serves the environment, because verifiers does not notice when one is gone.

Without that, every further rollout of the environment fails for as long as the run lasts.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

LOOK_SECONDS = 2.0
REFUSALS = 3
"""Refused connections in a row after which a server is gone: one that is busy accepts, or lets wait."""

_log = logging.getLogger(__name__)


def watch_shared_tools() -> None:
    """Let a process that serves an environment end when one of its shared tool servers has.

    Whoever watches the process starts it again, tools included, and what was under way is sampled again.
    """
    from verifiers.v1.env import Env

    serving = Env.serving

    @contextlib.asynccontextmanager
    async def watched(self: Any) -> AsyncIterator[None]:
        async with serving(self):
            watching = [asyncio.create_task(end_without(*each)) for each in local(self._shared_tools)]
            try:
                yield
            finally:
                for each in watching:
                    each.cancel()

    Env.serving = watched


def local(servers: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Return name, host and port of the servers that were started here; those of others are theirs to watch."""
    own = [(name, urlsplit(each.url)) for name, each in servers.items() if each.local and not each.external]
    return [(name, url.hostname, url.port) for name, url in own if url.hostname and url.port]


async def end_without(name: str, host: str, port: int) -> None:
    """Look now and then whether a server takes connections, and end this process once it refuses them for good."""
    refusals = 0
    while refusals < REFUSALS:
        await asyncio.sleep(LOOK_SECONDS)
        refusals = refusals + 1 if await refuses(host, port) else 0
    _log.error("the shared tool server %r at %s:%d is gone: the environment server ends", name, host, port)
    os.kill(os.getpid(), signal.SIGTERM)


async def refuses(host: str, port: int) -> bool:
    """Tell whether nobody listens there. An answer that takes long is none: the server may be busy."""
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
