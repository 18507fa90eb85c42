"""What a step of storage costs as history grows: `python -m benchmarks.store_growth [ROOT]`.

Commits 500 steps (two slices and a ledger row each) and prints, after 10, 100 and 500 of them, the median wall-clock
and processor time of a commit, of opening the store and finding a key in a fresh handle, and of reading a step back;
once without and once with maintenance every 50 steps. Compare ratios, not milliseconds: they depend on the disk.
Superseded log files are kept for a minute for readers under way; here for none, since 500 steps pass too quickly.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from storage.delta import log as logs
from storage.maintenance.compact import maintain
from storage.refs import Entry
from storage.schemas.stage_tables import TABLES
from storage.store import Store, open_store

MARKS = (10, 100, 500)
WINDOW = 25
ROWS, LENGTH = 128, 64


def main() -> None:
    """Run both variants and print a table."""
    logs.RETAINED_MINUTES = 0
    print("| maintenance | steps | commit ms | commit cpu ms | open + find ms | read ms | files active | log MB |")
    print("|---|---|---|---|---|---|---|---|")
    for every in (None, 50):
        directory = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
        try:
            grow(directory / "store", every)
        finally:
            shutil.rmtree(directory)


def grow(root: Path, every: int | None) -> None:
    """Commit step after step, printing a line at each mark."""
    store = open_store(root)
    rows = messages()
    commits: list[tuple[float, float]] = []
    for step in range(MARKS[-1]):
        processor = time.process_time()
        wall = seconds(lambda step=step: commit(store, rows, step))  # type: ignore[misc]
        commits.append((wall, time.process_time() - processor))
        if every and (step + 1) % every == 0:
            maintain(store)
        if step + 1 in MARKS:
            opened = median(lambda step=step: find(root, step))  # type: ignore[misc]
            read = median(lambda step=step: store.read(found(store, step).slices("messages")))  # type: ignore[misc]
            active = len(store.slices.table("messages").active_files()) + len(store.ledger.table.active_files())
            log = sum(path.stat().st_size for path in root.rglob("_delta_log/*")) / 1e6
            spent, processor = (statistics.median(each) * 1e3 for each in zip(*commits[-WINDOW:], strict=True))
            line = f"{every or 'none'} | {step + 1} | {spent:.0f} | {processor:.0f} | {opened * 1e3:.0f}"
            print(f"| {line} | {read * 1e3:.1f} | {active} | {log:.1f} |", flush=True)


def messages() -> pa.Table:
    """One step's rows: 128 messages of 64 tokens."""
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
    outputs = tuple(store.append("messages", rows, run="run", step=step, key=key, attempt=f"{key}-{n}") for n in (0, 1))
    now = datetime.now(UTC)
    store.ledger.commit(Entry("run", step, "rollout", 1, key, "", key, {}, {}, outputs, now, now))


def find(root: Path, step: int) -> None:
    """What a run does at its start."""
    assert open_store(root).ledger.find(f"key-{step}") is not None


def found(store: Store, step: int) -> Entry:
    """The entry of a step."""
    entry = store.ledger.find(f"key-{step}")
    assert entry is not None
    return entry


def median(act: Callable[[], object]) -> float:
    """The median wall-clock of a few calls, in seconds."""
    return statistics.median(seconds(act) for _ in range(WINDOW))


def seconds(act: Callable[[], object]) -> float:
    """The wall-clock of one call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
