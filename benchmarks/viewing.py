"""How long the viewer's pages take over a large store: `python -m benchmarks.viewing [DIRECTORY]`; see viewing.md.

The stores are made first, in some minutes, or read from DIRECTORY, where they are left: `thousand` (1,000 steps of 128
rollouts, two forks), `wide` (one step of 10,000 rollouts) and `long` (two rollouts of 10,001 messages). Pages come from
the real server over HTTP. Cold is the first request to a server that was just started, warm the median of those after
it; the disk's files are in memory in both. kB are those over the wire, nodes the elements of the HTML.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from benchmarks.fixtures.large_store import CREDITED, FORK, RUN, make
from flows.queries.step_history import StepHistory
from flows.viewer import addresses
from storage.read.frames import Frames, existing_store

STORES: Mapping[str, Mapping[str, Any]] = {
    "thousand": {"steps": 1000, "rollouts": 128, "fork": 980},
    "wide": {"steps": 1, "rollouts": 10_000},
    "long": {"steps": 1, "rollouts": 2, "group_size": 2, "messages": 10_001},
}
COLD, WARM = 3, 5
ADDRESS = re.compile(r"http://\S+")
ELEMENT = re.compile(r"<[a-zA-Z]")
"""Text of a page is escaped: this begins an element, and nothing else does."""


def main() -> None:
    """Make the missing stores, measure, and print the table."""
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(sys.argv[1] if len(sys.argv) > 1 else directory))


def measure(directory: Path) -> None:
    """Print a line of the table for each page of each store."""
    print(
        "| store | page | cold ms | of the processor | warm ms | of the processor | kB | nodes |\n|---|---"
        + "|---:" * 6
        + "|"
    )
    for store, sizes in STORES.items():
        if not (directory / store).exists():
            make(directory / store, **sizes)
        for page, path in pages(directory / store, store).items():
            cold = []
            for _ in range(COLD):
                with served(directory / store) as server:
                    *cost, size, nodes = server.cost(path)
                    cold.append(cost)
                    warm = [server.cost(path)[:2] for _ in range(WARM)]
            cells = [median(column) * 1e3 for costs in (cold, warm) for column in zip(*costs, strict=True)]
            numbers = " | ".join(f"{cell:.0f}" for cell in (*cells, size / 1e3, nodes))
            print(f"| {store} | {page} | {numbers} |", flush=True)


def pages(root: Path, store: str) -> dict[str, str]:
    """Return the addresses of the pages of a store by their names."""
    frames = Frames(existing_store(root))
    lineage = [lineage for lineage in StepHistory(frames.graph, RUN).lineages if lineage.for_training][-1]
    step = lineage.traces.step
    trace = frames.rows([lineage.traces], "traces").sort("trace_id").first().collect()
    name = str(trace["trace_id"][0])
    messages = frames.rows([lineage.traces], "messages").select("content").first().collect()
    word = str(messages["content"][0]).split()[0]
    found = {
        "step": addresses.step(RUN, step),
        "step, sorted": addresses.step(RUN, step, sort="reward", order="desc", outcome="trained"),
        "trace": addresses.trace(RUN, name, lineage.traces.key),
        "batch": addresses.batch(RUN, step),
    }
    if store == "thousand":
        found |= {
            "runs": addresses.runs(),
            "run": addresses.run(RUN),
            "search": addresses.search(RUN, word),
            "trace by its id alone": addresses.any_trace(name),
            "compare two runs": addresses.compare(RUN, FORK),
            "compare a step": addresses.compare(RUN, CREDITED, step=step),
        }
    return found


class Server:
    """A viewer that answers."""

    def __init__(self, url: str, pid: int) -> None:
        self.client = httpx.Client(base_url=url, timeout=300)
        self._process = psutil.Process(pid)

    def cost(self, path: str) -> tuple[float, float, int, int]:
        """Return a page's seconds of wall-clock and of the server's processor, its bytes over the wire, its elements.

        Raises httpx.HTTPStatusError where the page is refused.
        """
        began, used = time.perf_counter(), self._processor_seconds()
        answer = self.client.get(path).raise_for_status()
        seconds = time.perf_counter() - began, self._processor_seconds() - used
        return *seconds, answer.num_bytes_downloaded, len(ELEMENT.findall(answer.text))

    def _processor_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def served(root: Path) -> Iterator[Server]:
    """Serve a store as `stagecoach view` does; the process ends with the block."""
    command = [sys.executable, "-m", "flows.cli", "view", "--store", str(root), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        url = next(match[0].rstrip("/") for line in process.stdout if (match := ADDRESS.search(line)))
        server = Server(url, process.pid)
        for _ in range(600):  # until it answers, without a look at the store's tables
            try:
                server.client.get("/static/base.js")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    main()
