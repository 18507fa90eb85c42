"""The real server over a store, in a process of its own, and how long it takes to answer."""

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ADDRESS = re.compile(r"http://\S+")
ELEMENT = re.compile(r"<[a-zA-Z]")
"""Text of a page is escaped: this begins an element, and nothing else does."""


@dataclass(frozen=True)
class Cost:
    """What something took: wall-clock and processor time, in seconds."""

    wall: float
    processor: float

    def __str__(self) -> str:
        return f"{self.wall * 1e3:.0f} | {self.processor * 1e3:.0f}"


def middle(costs: Sequence[Cost]) -> Cost:
    """Return the medians."""
    return Cost(statistics.median(each.wall for each in costs), statistics.median(each.processor for each in costs))


def processor(act: Callable[[], object]) -> float:
    """Return the processor time that a call takes in this process, in seconds."""
    began = time.process_time()
    act()
    return time.process_time() - began


class Server:
    """A viewer that answers."""

    def __init__(self, url: str, pid: int) -> None:
        self.client = httpx.Client(base_url=url, timeout=300)
        self._process = psutil.Process(pid)

    def cost(self, path: str) -> tuple[Cost, int, int]:
        """Return what a page costs, its bytes over the wire, and its elements.

        Raises httpx.HTTPStatusError where it cannot be had.
        """
        began, used = time.perf_counter(), self.processor_seconds()
        answer = self.client.get(path)
        cost = Cost(time.perf_counter() - began, self.processor_seconds() - used)
        answer.raise_for_status()
        return cost, answer.num_bytes_downloaded, len(ELEMENT.findall(answer.text))

    def processor_seconds(self) -> float:
        """Return the processor time that the server has used since it began."""
        spent = self._process.cpu_times()
        return float(spent.user + spent.system)


@contextmanager
def served(root: Path) -> Iterator[Server]:
    """Serve a store as `stagecoach view` does; the process is gone when the block ends."""
    command = [sys.executable, "-m", "flows.cli", "view", "--store", str(root), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        server = Server(_address(process), process.pid)
        _await(server)
        yield server
        server.client.close()
    finally:
        process.terminate()
        process.wait(30)


def _address(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := ADDRESS.search(line):
            return found[0].rstrip("/")
    raise RuntimeError(f"the viewer ended with {process.wait()} and named no address")


def _await(server: Server) -> None:
    """Wait until the server answers at all, without touching the store's tables."""
    for _ in range(600):
        try:
            server.client.get("/static/base.js")
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("the viewer does not answer")
