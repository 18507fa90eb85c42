"""How long a search over all rollouts of a run takes: `python -m benchmarks.searching [ROOT]`; see searching.md.

ROOT is a store of `benchmarks.viewing`; without it one of 200 steps is made. A search is that of the viewer's page. For
comparison the last one is also a loop in Python over the same rollouts as JSON lines, with step, reward, length and
reply on each line.
"""

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.fixtures.large_store import RUN, make
from flows.queries.conditions import search_condition
from flows.queries.rollout_search import describe_hits, run_rollouts, search_run
from flows.queries.store_reader import StoreReader

PATTERN = r"ba[a-z]+ga\b"
SEARCHES = {
    "a number": "reward > 0.8",
    "a text": "bagaga",
    "an expression": f"/{PATTERN}/",
    "a condition": f"reward > 0.8 and length < 100 and reply ~ '{PATTERN}'",
}
"""Each is searched in a reader that has read nothing but the ledger, and then once more."""
COLUMNS = ("step", "reward", "length", "reply")


def main() -> None:
    """Print a line of the table for each search, and that of the loop."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(directory, "store")
        if not root.exists():
            make(root, steps=200, rollouts=128)
        print("| search | hits | cold s | of the processor | again s | of the processor |\n|---|" + "---:|" * 5)
        for name, text in SEARCHES.items():
            reader = StoreReader.at(root).still()
            reader.history(RUN)
            hits, *cold = timed(lambda reader=reader, text=text: search(reader, text))  # type: ignore[misc]
            _, *again = timed(lambda reader=reader, text=text: search(reader, text))  # type: ignore[misc]
            print(f"| {name} | {hits} | {' | '.join(f'{value:.2f}' for value in (*cold, *again))} |", flush=True)
        rollouts = run_rollouts(reader, RUN, COLUMNS).select(COLUMNS)
        rollouts.write_ndjson(file := Path(directory, "rollouts.jsonl"))
        hits, *seconds = timed(lambda: search_lines(file))
        wall, processor = seconds
        print(f"| the condition, by a loop | {hits} | {wall:.2f} | {processor:.2f} | | |\n{rollouts.height} rollouts")


def search(reader: StoreReader, text: str) -> int:
    """Search as the viewer's page does, with the sentences of the first hits; return the number of hits."""
    condition = search_condition(text)
    result = search_run(reader, RUN, condition)
    describe_hits(reader, RUN, result.rows.head(50), condition)
    return int(result.counts["num_hits"].sum())


def search_lines(file: Path) -> int:
    """Return the hits of the last of the searches, line by line."""
    pattern = re.compile(PATTERN)
    with file.open() as lines:
        rows = [row for row in map(json.loads, lines) if None not in (row["reward"], row["reply"])]
    return sum(bool(row["reward"] > 0.8 and row["length"] < 100 and pattern.search(row["reply"])) for row in rows)


def timed(work: Callable[[], int]) -> tuple[int, float, float]:
    """Return the result of a call, its seconds of wall-clock and those of the processor."""
    began, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - began, time.process_time() - processor


if __name__ == "__main__":
    main()
