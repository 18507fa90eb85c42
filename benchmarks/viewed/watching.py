"""What a running step pays for being watched: steps walked in one process, their page followed from another."""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread

import httpx

from benchmarks.viewed.serving import Server, served
from benchmarks.viewing_store import RUN
from flows.viewer import addresses

EVERY_SECONDS = 2.0
"""How often a page looks for news, as static/base.js does."""
REST = 10.0
"""Its rest after a look, in lengths of that look, if that is longer."""
BLOCK = 10
"""Steps in a row that are watched, or not; the first of each is not counted: the other state is still in it."""


@dataclass
class Block:
    """Some steps in a row."""

    watched: bool
    seconds: list[float] = field(default_factory=list)
    """Wall-clock of each step."""
    processor: list[float] = field(default_factory=list)
    """Processor seconds of each step."""

    @property
    def median(self) -> float:
        """The median wall-clock."""
        return statistics.median(self.seconds)


@dataclass
class Watched:
    """Blocks of steps in turn, unwatched and watched, unwatched first and last; and what the server did meanwhile."""

    blocks: list[Block] = field(default_factory=list)
    num_pages: int = 0
    server_processor: float = 0.0
    """Processor seconds of the server."""

    def ratios(self) -> list[float]:
        """Return for each watched block how long its steps took, in terms of the unwatched ones around it."""
        return [
            self.blocks[place].median / statistics.mean((self.blocks[place - 1].median, self.blocks[place + 1].median))
            for place in range(1, len(self.blocks) - 1, 2)
        ]

    def noise(self) -> list[float]:
        """Return the same of every unwatched block and the one before it: what differs although nothing does."""
        alone = [each.median for each in self.blocks[::2]]
        return [later / earlier for earlier, later in pairwise(alone)]

    def of(self, watched: bool) -> tuple[float, float]:
        """Return the medians of wall-clock and processor seconds of all steps that were watched, or were not."""
        chosen = [each for each in self.blocks if each.watched == watched]
        seconds, processor = ([s for each in chosen for s in getattr(each, name)] for name in ("seconds", "processor"))
        return statistics.median(seconds), statistics.median(processor)


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
        """Look until `ends` is set."""
        seen, took = "", 0.0
        while not self.ends.wait(max(EVERY_SECONDS, REST * took)):
            took = 0.0
            if not self.looks.is_set():
                continue
            try:
                mark = self._server.client.get("/mark").json()["mark"]
                if mark != seen:
                    took = self._server.cost(self._path)[0].wall
                    self.num_pages += 1
                    seen = mark
            except httpx.HTTPStatusError:
                continue  # a step that is not there yet


def watch(root: Path, first: int, num_watched: int, rollouts: int, group_size: int) -> Watched:
    """Walk blocks of steps after the first `first`, so many of them watched, each between two that are not.

    The store grows.
    """
    last = first + (2 * num_watched + 1) * BLOCK
    command = [sys.executable, "-m", "benchmarks.viewed.walker"]
    command += [str(each) for each in (root, last, rollouts, group_size)]
    with served(root) as server:
        follower = Follower(server, addresses.run(RUN))
        server.cost(addresses.run(RUN))
        used = server.processor_seconds()
        follower.start()
        walker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            found = Watched(_blocks(walker, follower, first))
        finally:
            follower.ends.set()
            follower.join()
            walker.terminate()
            walker.wait(60)
        found.num_pages, found.server_processor = follower.num_pages, server.processor_seconds() - used
    return found


def _blocks(walker: "subprocess.Popen[str]", follower: Follower, first: int) -> list[Block]:
    """Read how long each step took, and let the page be followed in every second block of them."""
    assert walker.stdout is not None
    blocks: list[Block] = []
    for line in walker.stdout:
        record = json.loads(line)
        if (number := record["step"] - first) < 0:
            continue
        if not number % BLOCK:
            blocks.append(Block(watched=number // BLOCK % 2 == 1))
            (follower.looks.set if blocks[-1].watched else follower.looks.clear)()
            continue
        blocks[-1].seconds.append(record["seconds"])
        blocks[-1].processor.append(record["processor"])
    return blocks
