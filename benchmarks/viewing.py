"""How long the viewer's pages take over a large store: `python -m benchmarks.viewing [DIRECTORY]`.

The stores are made first by `benchmarks.viewing_store`, in some minutes, or found in DIRECTORY, where they are left:
`large` (200 steps of 512 rollouts and its forks), `kept` (the same after maintenance), `wide` (one step of 10,000) and
`long` (rollouts of 10,001 messages). `thousand` is measured where it is there: see benchmarks/viewing.md. kB are those
over the wire, nodes the elements of the HTML. Pages are had from the real server over HTTP. Cold is the first request
to a server that was just started, warm those after it, medians; the disk's files are in memory in both.
Beside wall-clock stands the server's processor time, which other work on the machine hardly changes.

Beside each page stands what else it could have been made of, in the same run: the same rows through `Store.read`, which
checks every digest, and the same rollouts as JSON lines read with a loop (`benchmarks/viewed/dumps.py`).

Last, steps are walked while their run's page is followed, and while nobody looks. Compare ratios, not milliseconds.
"""

import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.viewed.dumps import dump, read_best, read_one, read_rewards
from benchmarks.viewed.questions import Question, questions
from benchmarks.viewed.serving import Cost, middle, processor, served
from benchmarks.viewed.watching import BLOCK, watch
from benchmarks.viewing_store import RUN, make
from flows.queries.step_history import StepHistory
from storage.maintenance.compact import maintain
from storage.read.frames import Frames, existing_store
from storage.read.lineage import Work

STEPS, ROLLOUTS, GROUP_SIZE = 200, 512, 16
FORK = 180
WIDE, LONG = 10_000, 10_001
COLD, WARM = 3, 5
DUMPED = 20
"""Steps that are dumped as JSON lines for the run's page; its time is taken that many times over."""
BLOCKS = 6
"""Blocks of steps that are watched."""


def main() -> None:
    """Make or find the stores, measure, and print the tables."""
    if len(sys.argv) > 1:
        _measure(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as directory:
        _measure(Path(directory))


def _measure(directory: Path) -> None:
    _fill(directory)
    print("| store | page | cold ms | of the processor | warm ms | of the processor | kB | nodes |")
    print("|---|---|---|---|---|---|---|---|")
    cold: dict[tuple[str, str], Cost] = {}
    for store in ("large", "kept", "wide", "long", *(["thousand"] if (directory / "thousand").exists() else [])):
        for question in questions(directory / store, store):
            cold[store, question.name] = _print_cost(directory / store, store, question)
    _alternatives(directory, cold)
    _watching(directory)


def _fill(directory: Path) -> None:
    """Make the stores that are not there."""
    asked: dict[str, dict[str, Any]] = {
        "large": {"steps": STEPS, "rollouts": ROLLOUTS, "group_size": GROUP_SIZE, "fork": FORK},
        "wide": {"steps": 1, "rollouts": WIDE},
        "long": {"steps": 1, "rollouts": 2, "group_size": 2, "messages": LONG},
    }
    for name, given in asked.items():
        if not (directory / name).exists():
            began = time.perf_counter()
            make(directory / name, **given)
            print(f"made the store `{name}` in {time.perf_counter() - began:.0f} s", flush=True)
    if not (directory / "kept").exists():
        shutil.copytree(directory / "large", directory / "kept")
        maintain(existing_store(directory / "kept"))


def _print_cost(root: Path, store: str, question: Question) -> Cost:
    """Print what a page costs; return what it costs cold."""
    cold: list[Cost] = []
    warm: list[Cost] = []
    size = nodes = 0
    for attempt in range(COLD):
        with served(root) as server:
            try:
                cost, size, nodes = server.cost(question.path)
            except httpx.HTTPStatusError as error:
                print(f"| {store} | {question.name} | {error.response.status_code} | | | | | |", flush=True)
                return Cost(0.0, 0.0)
            cold.append(cost)
            if attempt == COLD - 1:
                warm = [server.cost(question.path)[0] for _ in range(WARM)]
    first, later = middle(cold), middle(warm)
    print(f"| {store} | {question.name} | {first} | {later} | {size / 1e3:.0f} | {nodes} |", flush=True)
    return first


def _alternatives(directory: Path, cold: dict[tuple[str, str], Cost]) -> None:
    """Print what the same costs with digests checked and out of JSON lines, and the ratios of the pages to that."""
    print("\nMilliseconds of the processor; a page had cold, against")
    print("| store | page | page | `Store.read` | ratio | JSON lines | ratio |")
    print("|---|---|---|---|---|---|---|")
    for store, steps in (("large", range(STEPS - DUMPED, STEPS)), ("wide", range(1))):
        frames = Frames(existing_store(directory / store))
        chosen = [
            lineage
            for lineage in StepHistory(frames.graph, RUN).lineages
            if lineage.for_training and lineage.traces.step in steps
        ]
        last = chosen[-1]
        works = [work for work in (last.traces, last.verdicts, last.samples, last.batches) if work]
        checked = processor(partial(_read_all, frames, works))
        with tempfile.TemporaryDirectory(dir=directory) as place:
            files = dump(frames, RUN, Path(place) / "dumped", steps)
            trace_id = str(frames.rows([last.traces], "traces").select("trace_id").collect()["trace_id"][-1])
            table = processor(partial(read_best, files[steps[-1]]))
            single = processor(partial(read_one, files[steps[-1]], trace_id))
            curve = processor(partial(read_rewards, list(files.values()))) * STEPS / DUMPED
        _ratio(store, "step", cold[store, "step"], checked, table)
        _ratio(store, "trace", cold[store, "trace"], checked, single)
        if store == "large":
            _ratio(store, "run", cold[store, "run"], None, curve)


def _ratio(store: str, page: str, cost: Cost, read: float | None, text: float) -> None:
    took = cost.processor
    checked = f"{read * 1e3:.0f} | {took / read:.2f}" if read else "- | -"
    print(f"| {store} | {page} | {took * 1e3:.0f} | {checked} | {text * 1e3:.0f} | {took / text:.2f} |", flush=True)


def _read_all(frames: Frames, works: list[Work]) -> None:
    """Read all that some work made, with digests checked, as a stage does."""
    for work in works:
        for table in sorted(work.tables):
            frames.store.read(list(work.slices_of(table)))


def _watching(directory: Path) -> None:
    """Print what steps take while their run's page is followed, and while nobody looks; on a copy that grows."""
    grown = directory / "grown"
    shutil.copytree(directory / "large", grown)
    try:
        found = watch(grown, STEPS, BLOCKS, ROLLOUTS, GROUP_SIZE)
    finally:
        shutil.rmtree(grown)
    print(f"\n{len(found.blocks)} blocks of {BLOCK} steps after {STEPS}, every other one watched:\n")
    print("| steps | seconds, median | processor seconds, median |")
    print("|---|---|---|")
    for watched, label in ((False, "nobody looks"), (True, "the run's page is followed")):
        print(f"| {label} | {{:.3f}} | {{:.3f}} |".format(*found.of(watched)))
    ratios, noise = found.ratios(), found.noise()
    print(f"\nwatched to the blocks around: {_spread(ratios)}; unwatched to the one before: {_spread(noise)}")
    used = found.server_processor / max(found.num_pages, 1)
    print(f"the server read {found.num_pages} pages of the run, {used * 1e3:.0f} ms of processor time each")


def _spread(ratios: list[float]) -> str:
    return f"median {statistics.median(ratios):.2f} ({', '.join(f'{each:.2f}' for each in ratios)})"


if __name__ == "__main__":
    main()
