"""Deals groups to the replicas of an engine, and samples those of a lost replica again at another one.

A group stays at one replica, which shares the states of its prompt. A replica that is lost costs the groups that it
has, which have left nothing yet. One that is started again gets groups once it serves the policy.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tasks.inference.engine.client import ServedModel

JOIN_SECONDS = 1.0
"""Between two looks whether a replica that is missing is there again."""

_log = logging.getLogger("stagecoach")


class Replicas:
    """The replicas of the policy's engine while a batch is sampled.

    `bring` returns where the policy is served by now; it is called in a thread while a replica is missing. Without it a
    lost replica is the loss of the engine.
    """

    def __init__(self, urls: Sequence[str], num_replicas: int, bring: Callable[[], ServedModel] | None) -> None:
        self.urls = list(urls)
        """Those that are there, by URL."""
        self._num_replicas = num_replicas
        self._bring = bring
        self._groups: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """By group that is being sampled, its replica and its work."""
        self._lost: set[str] = set()
        """Those that were there and are not, by URL."""

    def url_of(self, group_id: str) -> str:
        """Return the replica of a group that is being sampled; the first one for all others."""
        return self._groups[group_id][0] if group_id in self._groups else self.urls[0]

    async def run(self, group_id: str, sample: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Sample a group at the replica that has fewest; return False where that was lost meanwhile.

        Raises what `sample` raises.
        """
        shares = Counter(url for url, _ in self._groups.values())
        url = min(self.urls, key=lambda each: shares[each], default="")  # none where frozen models alone sample
        task = asyncio.create_task(sample())
        self._groups[group_id] = url, task
        try:
            await asyncio.wait([task])
        finally:
            if not task.done():  # whoever waits is cancelled, and all sampling ends
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            self.finish(group_id)
        if task.cancelled():  # by `survive`: a cancellation of the caller is raised above
            return False
        task.result()
        return True

    def finish(self, group_id: str) -> None:
        """Note that the replica has done its part for a group: the loss of it costs the group nothing any more."""
        self._groups.pop(group_id, None)

    def survive(self, url: str) -> bool:
        """Stop the groups of a lost replica, and tell whether others are left to sample them."""
        if url in self._lost:
            return True
        if self._bring is None or url not in self.urls or len(self.urls) == 1:
            return False
        self.urls.remove(url)
        self._lost.add(url)
        tasks = [task for each, task in self._groups.values() if each == url]
        _log.warning(
            "the engine's replica at %s is gone: its %d groups in flight are sampled again by the other %d",
            url,
            len(tasks),
            len(self.urls),
        )
        for task in tasks:
            task.cancel()
        return True

    async def follow(self, joined: Callable[[ServedModel], None]) -> None:
        """Take in replicas that are there again, until cancelled; `joined` gets the model as it is served then."""
        while self._bring is not None:
            await asyncio.sleep(JOIN_SECONDS)
            if len(self.urls) == self._num_replicas:
                continue
            lost = frozenset(self._lost)
            served = await asyncio.to_thread(self._bring)
            # One that was lost while it was looked for comes with a later look; an address may be the same again.
            if new := [url for url in served.urls if url not in self.urls and url not in self._lost - lost]:
                _log.info("the engine's replicas at %s sample from now on", ", ".join(new))
                self.urls += new
                self._lost.difference_update(new)
                joined(served)
