"""Engine metrics: how busy an engine is, as it says itself under `/metrics`."""

from collections import defaultdict
from dataclasses import dataclass

from tasks.inference.scoring import Served

SECONDS = 5.0
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
CACHE_USE, PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"


@dataclass(frozen=True)
class Reading:
    """What an engine said at one moment."""

    running: float
    """Requests in its batch."""
    waiting: float
    """Requests in its queue."""
    cache_use: float
    """Share of its cache of keys and values that is in use, from 0 to 1."""
    preemptions: float
    """Requests that were taken out of the batch again since it was started."""

    def __str__(self) -> str:
        return (
            f"{self.running:.0f} requests run, {self.waiting:.0f} wait, {self.cache_use:.0%} of the cache is in use, "
            f"{self.preemptions:.0f} preemptions"
        )


def parse(text: str) -> Reading | None:
    """Return the reading in a page of metrics in the Prometheus text format; None where it is not all there.

    An engine of several cores has a line for each: what they count is added up, of the cache the fullest is taken.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name in (RUNNING, WAITING, CACHE_USE, PREEMPTIONS):
            found[name].append(float(rest.rpartition("}")[2].split()[0]))
    if len(found) < 4:
        return None
    return Reading(sum(found[RUNNING]), sum(found[WAITING]), max(found[CACHE_USE]), sum(found[PREEMPTIONS]))


async def read(engine: Served) -> Reading | None:
    """Ask an engine; None where it has no such metrics. Raises ConnectionError where it gives no answer."""
    import httpx

    headers = {"Authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}
    try:
        async with httpx.AsyncClient(timeout=SECONDS, trust_env=False) as client:
            answer = await client.get(f"{engine.url.rstrip('/')}/metrics", headers=headers)
    except httpx.TransportError as error:
        raise ConnectionError(f"no metrics from {engine.url}: {error or type(error).__name__}") from error
    if answer.status_code >= 500:
        raise ConnectionError(f"no metrics from {engine.url}: it answers {answer.status_code}")
    return parse(answer.text) if answer.status_code == 200 else None
