"""Measures a search over all rollouts of a run: `python -m benchmarks.searching ROOT`, with a store of `viewing_store`.

Beside it stand two loops in Python for one of the searches: over the store's rows, read step by step as stages read
them, and over the same rollouts as JSON lines, with step, reward, length and reply on each line.
"""

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.viewing_store import RUN
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
"""What is searched for, each in a reader that has read nothing yet but the ledger, and then once more."""


def main() -> None:
    """Print a line of the table for each search, and those of the loop."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("root", type=Path)
    root = options.parse_args().root
    print("| search | hits | cold s | of the processor | again s | of the processor |\n|---|---|---|---|---|---|")
    for name, text in SEARCHES.items():
        library = StoreReader.at(root).still()
        library.history(RUN)
        hits, *cold = _timed(lambda library=library, text=text: _search(library, text))
        _, *again = _timed(lambda library=library, text=text: _search(library, text))
        print(f"| {name} | {hits} | {' | '.join(f'{each:.2f}' for each in (*cold, *again))} |", flush=True)
    hits, *loop = _timed(lambda: _loop_over_store(library))
    print(f"| the condition, by a loop over `Store.read` | {hits} | {loop[0]:.2f} | {loop[1]:.2f} | | |", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rollouts.jsonl"
        rows = run_rollouts(library, RUN, ("step", "reward", "length", "reply"))
        rows.select("step", "reward", "length", "reply").write_ndjson(file)
        hits, *loop = _timed(lambda: _loop(file))
        print(f"| the condition, by a loop over {file.stat().st_size / 2**20:.0f} MiB of JSON lines | {hits} ", end="")
        print(f"| {loop[0]:.2f} | {loop[1]:.2f} | | |\nof {rows.height} rollouts")


def _search(library: StoreReader, text: str) -> int:
    """Search as the viewer's page does, the first hits with their sentences; return the number of hits."""
    condition = search_condition(text)
    found = search_run(library, RUN, condition)
    describe_hits(library, RUN, found.rows.head(50), condition)
    return int(found.counts["num_hits"].sum())


def _loop_over_store(library: StoreReader) -> int:
    """Do the last of the searches step by step, digests checked; in contents alone, without calls of tools."""
    pattern, found = re.compile(PATTERN), Counter[int]()
    for work in (lineage.traces for lineage in library.history(RUN).lineages):
        columns = ["trace_id", "reward", "num_output_tokens"]
        traces = library.store.read(work.slices_of("traces"), columns).to_pylist()
        names = ["trace_id", "message", "content", "sampled"]
        replies: dict[str, str] = {}
        for row in library.store.read(work.slices_of("messages"), names).to_pylist():
            if row["sampled"] and row["content"]:
                replies[row["trace_id"]] = replies.get(row["trace_id"], "") + "\n" + row["content"]
        for row in traces:
            fits = row["reward"] is not None and row["reward"] > 0.8 and row["num_output_tokens"] < 100
            found[work.step] += bool(fits and pattern.search(replies.get(row["trace_id"], "")))
    return sum(found.values())


def _loop(file: Path) -> int:
    """Do the last of the searches line by line, with a count for each step."""
    pattern, found = re.compile(PATTERN), Counter[int]()
    with file.open() as lines:
        for line in lines:
            row = json.loads(line)
            fits = row["reward"] is not None and row["reward"] > 0.8 and row["length"] < 100
            if fits and row["reply"] is not None and pattern.search(row["reply"]):
                found[row["step"]] += 1
    return sum(found.values())


def _timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return what work comes to, its seconds of wall-clock and those of the processor."""
    began, of_processor = time.perf_counter(), time.process_time()
    found = work()
    return found, time.perf_counter() - began, time.process_time() - of_processor


if __name__ == "__main__":
    main()
