"""What a running step pays for being watched: steps walked in one process, their page followed from another."""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import httpx

from benchmarks.viewed.serving import Server, served
from benchmarks.viewing_store import RUN
from flows.viewer import addresses

EVERY_SECONDS = 2.0
"""How often a page looks for news, as static/base.js does."""
BLOCK = 12
"""Steps in a row that are watched, or not; the first of each is not counted: the other state is still in it."""


@dataclass
class Watched:
    """Seconds of steps, by whether somebody watched, and what the server used meanwhile."""

    alone: list[float] = field(default_factory=list)
    watched: list[float] = field(default_factory=list)
    pairs: list[float] = field(default_factory=list)
    """Ratio of the medians of a watched block to the block before it."""
    num_pages: int = 0
    server_processor: float = 0.0
    """Processor seconds of the server while somebody watched."""
    processor: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """Processor seconds of steps, by whether somebody watched."""


class Follower(Thread):
    """Follows a page as a browser does that stays open: asks for the mark, and reads the page when it is another."""

    def __init__(self, server: Server, path: str) -> None:
        super().__init__(daemon=True)
        self.looks = Event()
        self.ends = Event()
        self.num_pages = 0
        self._server = server
        self._path = path

    def run(self) -> None:
        """Look until told to end."""
        seen = ""
        while not self.ends.wait(EVERY_SECONDS):
            if not self.looks.is_set():
                continue
            try:
                mark = self._server.client.get("/mark").json()["mark"]
                if mark != seen:
                    self._server.seconds(self._path)
                    self.num_pages += 1
                    seen = mark
            except httpx.HTTPStatusError:
                continue  # a step that is not there yet


def watch(root: Path, first: int, num_blocks: int, rollouts: int, group_size: int) -> Watched:
    """Walk `2 * num_blocks` blocks of steps after the first `first`, every other one watched; the store grows."""
    last = first + 2 * num_blocks * BLOCK
    command = [sys.executable, "-m", "benchmarks.viewed.walker"]
    command += [str(each) for each in (root, last, rollouts, group_size)]
    found = Watched()
    with served(root) as server:
        follower = Follower(server, addresses.run(RUN))
        server.seconds(addresses.runs())
        follower.start()
        walker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            _follow(walker, follower, server, first, found)
        finally:
            follower.ends.set()
            follower.join()
            walker.terminate()
            walker.wait(60)
    return found


def _follow(walker: "subprocess.Popen[str]", follower: Follower, server: Server, first: int, found: Watched) -> None:
    """Read how long each step took, and let the page be followed in every second block of them."""
    assert walker.stdout is not None
    block: list[float] = []
    before: Sequence[float] = ()
    used = server.processor_seconds()
    for line in walker.stdout:
        told = json.loads(line)
        if (number := told["step"] - first) < 0:
            continue
        on = number // BLOCK % 2 == 1
        if number % BLOCK:
            block.append(told["seconds"])
            (found.watched if on else found.alone).append(told["seconds"])
            found.processor[on].append(told["processor"])
        if number % BLOCK < BLOCK - 1:
            continue
        if on:
            found.pairs.append(statistics.median(block) / statistics.median(before))
            found.server_processor += server.processor_seconds() - used
            follower.looks.clear()
        else:
            used = server.processor_seconds()
            follower.looks.set()
        before, block = block, []
    found.num_pages = follower.num_pages
