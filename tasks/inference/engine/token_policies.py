"""Knows which policy sampled which tokens of a request, where weights are exchanged under requests in flight.

Tokens are counted while the engine is paused, before other weights are loaded: all tokens up to there belong to the
policy that is served. What is sampled after it belongs to the policy that is named next, by vLLM's own
`/update_weight_version`. The counts are the workers' own, and the engine samples nothing meanwhile: nothing here goes
by time.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

Run = tuple[str, int]
"""The key of a policy, and how many tokens it sampled."""


class PolicyLog:
    """The policy that the engine serves, and the tokens that others have sampled of requests in flight."""

    def __init__(self) -> None:
        self.current = ""
        self._earlier: dict[str, list[Run]] = {}
        """By request, the runs of policies before the current one."""

    def close(self, counts: Mapping[str, int]) -> None:
        """Count the tokens of the requests in flight, by request, as sampled with the current policy or before."""
        # Of requests that are not in flight any more, `runs` has taken theirs, or nobody will.
        self._earlier = {each: self.runs(each, count) for each, count in counts.items()}

    def runs(self, request_id: str, count: int) -> list[Run]:
        """Return the runs of a request that has `count` tokens now; it has none left here then."""
        found: list[Run] = []
        for key, length in [*self._earlier.pop(request_id, ()), (self.current, count)]:
            # An aborted request is answered with fewer tokens than were sampled.
            if (length := min(length, count)) > 0:
                count -= length
                length += found.pop()[1] if found and found[-1][0] == key else 0
                found.append((key, length))
        return found


LOG = PolicyLog()
"""Of the one engine of this process."""


def watch_policies() -> None:
    """Patch vLLM's classes so that LOG knows the current policy, and each finished request its own."""
    update, put = AsyncLLM.update_weight_version, RequestOutputCollector.put

    async def update_and_note(self: AsyncLLM, new_version: str) -> None:
        await update(self, new_version)
        LOG.current = new_version

    def put_and_note(self: RequestOutputCollector, output: Any) -> None:
        note_policies(self, output)
        put(self, output)

    AsyncLLM.update_weight_version = update_and_note  # type: ignore[method-assign]
    RequestOutputCollector.put = put_and_note  # type: ignore[method-assign]


def note_policies(collector: RequestOutputCollector, output: Any) -> None:
    """Note which policies sampled the tokens of a request whose output has come; called at that very moment."""
    choices: Sequence[Any] = getattr(output, "outputs", ())
    if len(choices) == 1:  # of several, each has a request of its own in the engine
        vars(collector)["policies"] = LOG.runs(collector.request_id, len(choices[0].token_ids))


def policies_of(collector: RequestOutputCollector) -> list[Run]:
    """Return what was noted of a request; nothing where that is not known."""
    return list(vars(collector).get("policies", ()))


async def close_counts(engine: AsyncLLM) -> dict[str, int]:
    """Count the tokens of all requests in flight as those of the policy that is served; return them by request.

    The engine is paused.
    """
    await _handle_outputs(engine)
    counts = _largest(await engine.collective_rpc("sampled_counts"))
    LOG.close(counts)
    return counts


def _largest(workers: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for counts in workers:
        found |= {each: max(count, found.get(each, 0)) for each, count in counts.items()}
    return found


async def _handle_outputs(engine: Any) -> None:
    """Wait until all outputs that have left the engine's core are noted; it is paused, and sends no more."""
    engine._run_output_handler()  # it is started with the first request
    marker = Marker()
    engine.engine_core.outputs_queue.put_nowait(marker)
    await marker.seen.wait()


class Marker:
    """Stands in the queue of outputs behind all others, without one of its own, and notes that its turn has come."""

    outputs: tuple[Any, ...] = ()
    timestamp = 0.0
    engine_index = 0

    def __init__(self) -> None:
        self.seen = asyncio.Event()

    @property
    def scheduler_stats(self) -> None:
        """Read by vLLM's handler once it has gone through `outputs`, with nothing in it."""
        self.seen.set()
