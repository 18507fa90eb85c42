"""What engines counted while a step was sampled: their page of metrics, read at both ends of it and between.

A counter says how much there was since its engine started. So rates are made of differences, and an engine that was
started again meanwhile begins at zero: what it shows then is all new.
"""

import logging
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from storage.schemas.stage_tables import ENGINE_METRICS
from tasks.inference.engine.client import ServedModel, client_options

INTERVAL_SECONDS = 5.0
"""Between two readings: what an engine counted after the last one before it died is not known."""
TIMEOUT_SECONDS = 5.0
COUNTERS = {
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:request_success_total": "requests",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
}
"""What is summed, by the name that the engine gives it."""
GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "cache_use",
}
"""What is as it is at a moment: of several cores of an engine, requests are added, and the fullest cache counts."""
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "first_token",
    "vllm:inter_token_latency_seconds": "between_tokens",
    "vllm:request_queue_time_seconds": "queue",
    "vllm:e2e_request_latency_seconds": "request",
}
"""Latencies: counts of what took at most so long, which are counters too."""
STARTED = "process_start_time_seconds"
"""When the engine's process began: another one is another engine."""
Series = tuple[str, str]
"""A counter by our name, and what tells it from others of the name: its labels."""

_log = logging.getLogger(__name__)


class EngineMeter:
    """Adds up what one engine counts between readings of its page; the first reading is where it begins."""

    def __init__(self) -> None:
        self._last: tuple[dict[Series, float], float | None] | None = None
        self.latest: dict[str, float] = {}
        """Its gauges at the last reading, by name."""
        self.reset()

    def reset(self) -> None:
        """Forget what was counted, and count on from the last reading."""
        self._totals: dict[str, float] = defaultdict(float)
        """What was counted, by name: counters, and of latencies `_sum`, `_count` and `_le_BOUND`."""
        self._gauges: dict[str, list[float]] = defaultdict(list)
        self._restarts = 0
        self.failures = 0
        """Readings without an answer."""

    def add(self, page: str) -> bool:
        """Take a reading, in the Prometheus text format; return whether it had any counter of an engine."""
        counters, gauges, started = parse_page(page)
        if not counters:
            return False
        if self._last is not None:
            before, before_started = self._last
            # Another process, or a counter that fell: all begin at zero, also those that are larger again already.
            has_fallen = any(counters.get(series, 0.0) < value for series, value in before.items())
            is_restarted = started != before_started or has_fallen
            self._restarts += is_restarted
            for series, value in counters.items():
                # A counter that is new on the page began at zero, too.
                self._totals[series[0]] += value - (0.0 if is_restarted else before.get(series, 0.0))
        self._last = counters, started
        self.latest = gauges
        for name, value in gauges.items():
            self._gauges[name].append(value)
        return True

    def values(self) -> dict[str, float]:
        """Return all that was measured, by name; nothing where no reading had a counter."""
        if self._last is None:
            return {}
        values = dict(self._totals) | {"restarts": float(self._restarts), "failed_readings": float(self.failures)}
        for name, readings in self._gauges.items():
            values |= {f"{name}_max": max(readings), f"{name}_sum": sum(readings)}
        return values | {"readings": float(max(map(len, self._gauges.values()), default=0))}


def parse_page(page: str) -> tuple[dict[Series, float], dict[str, float], float | None]:
    """Return the counters of a page by series, its gauges by name, and when the process began, where it says that.

    A page that is none is one without counters.
    """
    from prometheus_client.parser import text_string_to_metric_families

    counters: dict[Series, float] = {}
    gauges: dict[str, list[float]] = defaultdict(list)
    started = None
    try:
        for sample in (each for family in text_string_to_metric_families(page) for each in family.samples):
            if sample.name in GAUGES:
                gauges[GAUGES[sample.name]].append(sample.value)
            elif sample.name == STARTED:
                started = sample.value
            elif name := _counter_name(sample.name, sample.labels):
                counters[name, str(sorted(sample.labels.items()))] = sample.value
    except (ValueError, KeyError, IndexError):
        return {}, {}, None
    return counters, {name: max(each) if name == "cache_use" else sum(each) for name, each in gauges.items()}, started


def _counter_name(name: str, labels: Mapping[str, str]) -> str:
    """Return our name of a counter; empty for one that nobody asks for."""
    if name in COUNTERS:
        return COUNTERS[name]
    for ending in ("_sum", "_count", "_bucket"):
        if (latency := HISTOGRAMS.get(name.removesuffix(ending))) and name.endswith(ending):
            return f"{latency}_le_{float(labels['le'])}" if ending == "_bucket" else f"{latency}{ending}"
    return ""


class EngineMetrics:
    """Reads the pages of some engines, at the beginning and the end of a block and every few seconds between."""

    def __init__(self, engines: Iterable[ServedModel]) -> None:
        self._engines = {url: engine.api_key for engine in engines if not engine.chat for url in engine.urls}
        self.meters = {url: EngineMeter() for url in self._engines}
        self._began = self._read_at = time.monotonic()
        self._lock = threading.Lock()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure within the block."""
        ended = threading.Event()
        self.read()
        self._began = self._read_at
        thread = threading.Thread(target=self._read_until, args=(ended,), name="engine metrics", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.read()

    def read(self) -> None:
        """Read each page once; an engine that does not answer is noted, and one without counters is left out."""
        pages = {url: read_page(url, api_key) for url, api_key in [*self._engines.items()]}
        with self._lock:
            self._read_at = time.monotonic()
            for url, page in pages.items():
                if page is None:
                    self.meters[url].failures += 1
                elif not self.meters[url].add(page):
                    del self._engines[url]
                    _log.warning("the engine at %s counts nothing under /metrics: steps have no metrics of it", url)

    def load(self, url: str) -> tuple[float, float]:
        """Return an engine's requests and the used share of its KV cache, as last read; one that is new is read on."""
        with self._lock:
            if url not in self.meters:
                self._engines[url], self.meters[url] = next(iter(self._engines.values()), ""), EngineMeter()
            latest = self.meters[url].latest
        return latest.get("running", 0.0) + latest.get("waiting", 0.0), latest.get("cache_use", 0.0)

    def take(self) -> pa.Table:
        """Return what was measured up to the last reading, and measure on from there; no rows where it is the same.

        They are in the ENGINE_METRICS schema: rows for each engine, by number, not by address.
        """
        interval, rows = uuid.uuid4().hex, list[dict[str, Any]]()
        with self._lock:
            seconds, self._began = self._read_at - self._began, self._read_at
            for number, meter in enumerate(self.meters.values() if seconds else ()):
                if values := meter.values():
                    values |= {"seconds": seconds}
                    place = {"interval": interval, "engine": number}
                    rows += [{**place, "name": name, "value": value} for name, value in sorted(values.items())]
                    meter.reset()
        return pa.Table.from_pylist(rows, schema=ENGINE_METRICS.arrow)

    def _read_until(self, ended: threading.Event) -> None:
        while not ended.wait(INTERVAL_SECONDS):
            self.read()


def read_page(url: str, api_key: str) -> str | None:
    """Return an engine's page, empty where it has none; None where it does not answer."""
    import httpx

    try:
        with httpx.Client(**client_options(url, api_key, TIMEOUT_SECONDS)) as client:
            answer = client.get("/metrics")
    except httpx.HTTPError:
        return None
    if answer.status_code >= 500:
        return None
    return answer.text if answer.status_code == 200 else ""
