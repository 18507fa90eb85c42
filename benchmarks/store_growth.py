"""What a step of storage costs as history grows: `python -m benchmarks.store_growth [ROOT] [STEPS]`.

Commits 10,000 steps (a slice of 16 x 32 tokens and a ledger row each) and prints, after 10, 100, 1,000 and all of them,
the median wall-clock and the mean processor time of a commit, the same of opening the store and finding a key in a
fresh handle, and of reading a step back; once with maintenance every 250 steps and once without. Compare ratios, not
milliseconds: they depend on the disk. Superseded log files are kept for a minute for readers under way; here for none,
since the steps pass too quickly.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from storage.delta import snapshot
from storage.maintenance.compact import maintain
from storage.refs import Entry
from storage.schemas.stage_tables import TABLES
from storage.store import Store, open_store

MARKS = (10, 100, 1000, 10_000)
# Enough that the mean holds what is done now and then: checkpoints, merges of the ledger's files, pruning of logs.
WINDOW = 50
NUM_LOOKS = 15
ROWS, LENGTH = 16, 32
EVERY = 250


def main() -> None:
    """Run both variants and print a table."""
    snapshot.RETAINED_MINUTES = 0
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else MARKS[-1]
    print(
        "| maintenance | steps | versions of messages, ledger | commit ms | commit cpu ms | open + find ms "
        "| open + find cpu ms | read ms | files active | log MB |"
    )
    print("|---" * 10 + "|")
    for every in (EVERY, None):
        directory = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
        try:
            grow(directory / "store", steps, every)
        finally:
            shutil.rmtree(directory)


def grow(root: Path, steps: int, every: int | None) -> None:
    """Commit step after step, printing a line at each mark."""
    store = open_store(root)
    rows = messages()
    commits: list[tuple[float, float]] = []
    for step in range(steps):
        commits.append(seconds(lambda step=step: commit(store, rows, step)))  # type: ignore[misc]
        if every and (step + 1) % every == 0:
            maintain(store)
        if step + 1 in MARKS:
            opened = [seconds(lambda step=step: find(root, step)) for _ in range(NUM_LOOKS)]  # type: ignore[misc]
            read = [
                seconds(lambda step=step: store.read(found(store, step).slices("messages")))  # type: ignore[misc]
                for _ in range(NUM_LOOKS)
            ]
            tables = store.slices.table("messages"), store.ledger.table
            log = sum(path.stat().st_size for path in root.rglob("_delta_log/*")) / 1e6
            # The first step makes the tables.
            cells = [*middle(commits[1:][-WINDOW:]), *middle(opened), middle(read)[0]]
            versions = ", ".join(str(table.refresh()) for table in tables)
            line = f"{every or 'none'} | {step + 1} | {versions} | {' | '.join(f'{each:.1f}' for each in cells)}"
            print(f"| {line} | {sum(len(table.active_files()) for table in tables)} | {log:.1f} |", flush=True)


def middle(measured: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The median wall-clock and the mean processor time of some calls, in milliseconds."""
    wall, processor = zip(*measured, strict=True)
    return statistics.median(wall) * 1e3, statistics.fmean(processor) * 1e3


def messages() -> pa.Table:
    """One step's rows: 16 messages of 32 tokens."""
    row = {
        "trace_id": "trace",
        "parent": None,
        "role": "assistant",
        "content": "text",
        "body": "{}",
        "sampled": True,
        "token_ids": list(range(LENGTH)),
        "mask": [True] * LENGTH,
        "is_content": [],
        "logprobs": [-0.1 * n for n in range(LENGTH)],
    }
    return pa.Table.from_pylist([{**row, "message": n} for n in range(ROWS)], TABLES["messages"].arrow)


def commit(store: Store, rows: pa.Table, step: int) -> None:
    """What a stage does: look, append, name in the ledger."""
    key = f"key-{step}"
    assert store.ledger.find(key) is None
    output = store.append("messages", rows, run="run", step=step, key=key, attempt=key)
    now = datetime.now(UTC)
    store.ledger.commit(Entry("run", step, "rollout", 1, key, "", key, {}, {}, (output,), now, now))


def find(root: Path, step: int) -> None:
    """What a run does at its start."""
    assert open_store(root).ledger.find(f"key-{step}") is not None


def found(store: Store, step: int) -> Entry:
    """The entry of a step."""
    entry = store.ledger.find(f"key-{step}")
    assert entry is not None
    return entry


def seconds(act: Callable[[], object]) -> tuple[float, float]:
    """The wall-clock and the processor time of one call."""
    start, processor = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - start, time.process_time() - processor


if __name__ == "__main__":
    main()
