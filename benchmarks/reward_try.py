"""What trying a reward on 100,000 rollouts takes: `python -m benchmarks.reward_try [ROOT]`; see reward_try.md.

ROOT is a store of `benchmarks.fixtures.large_store`; without it one of 200 steps with 512 rollouts is made. The
function says how long a reply is. The alternative is a loop over the same rollouts as JSON lines, in one process.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import psutil

from benchmarks.fixtures.large_store import RUN, make
from flows.queries.reward_figures import try_figures
from flows.queries.reward_try import TriedReward, try_reward
from flows.queries.rollout_search import run_rollouts
from flows.queries.store_reader import StoreReader


def length(group: Sequence[Any]) -> list[float]:
    """Return the length of each reply, in hundreds of characters."""
    return [len(one.reply) / 100 for one in group]


def worker_bytes() -> list[int]:
    """Return the bytes of each process below this one, and 0."""
    with suppress(psutil.Error):
        return [0, *(one.memory_info().rss for one in psutil.Process().children(recursive=True))]
    return [0]


def main() -> None:
    """Print seconds and memory of a try, and seconds of the loop."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(directory, "store")
        if not root.exists():
            make(root, steps=200, rollouts=512)
        began = time.perf_counter()
        tried = TriedReward("length", f"{__spec__.name}:length")
        with ThreadPoolExecutor(1) as thread:
            scoring = thread.submit(lambda: pl.concat(try_reward(StoreReader.at(root), [RUN], tried)))
            memory = 0
            while not scoring.done():
                memory = max(memory, *worker_bytes())
                time.sleep(0.5)
        rows = scoring.result()
        scored = time.perf_counter()
        try_figures(rows, 1.0)
        ended = time.perf_counter()
        print(f"| {rows.height} rollouts | scored {scored - began:.1f} s | figures {ended - scored:.1f} s |")
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(f"| largest memory of this process | {own:.0f} MiB |\n| of a worker | {memory / 2**20:.0f} MiB |")
        replies = run_rollouts(StoreReader.at(root), RUN, ("trace_id", "for_training", "reward", "reply"))
        replies.filter("for_training").write_ndjson(file := Path(directory, "rollouts.jsonl"))
        began = time.perf_counter()
        with file.open() as lines:
            count = sum(len(row["reply"] or "") / 100 >= 0 for row in map(json.loads, lines))
        print(f"| a loop over {count} JSON lines | {time.perf_counter() - began:.1f} s |")


if __name__ == "__main__":
    main()
