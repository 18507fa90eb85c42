"""What a step costs as a run grows: `python -m benchmarks.endurance [STEPS] [ROOT]`.

The loop, the keys, the ledger, the tables and all stages between sampling and training are the real ones; sampling and
training are stand-ins of fixed rows (`tests.fixtures.rehearsal`), so there are no engine, no learner and no Prefect.
Prints at each mark medians of the last hundred steps: processor milliseconds of each stage, of a step's record and of
whole steps, commits in their thread included; with the memory of the process, the files of the store and their bytes.
Compare the lines, not machines.
"""

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psutil

from flows.runtime import loop
from flows.runtime.session import record_run
from tests.fixtures.rehearsal import Rehearsal, session_for

MARKS = (100, 200, 400, 1000, 2000, 5000, 10_000)
WINDOW = 100
Seconds = defaultdict[str, list[float]]


class Timed(Rehearsal):  # type: ignore[misc]
    """Notes the seconds of each stage: keys, look-up, work, rows and the ledger's row."""

    seconds: ClassVar[Seconds] = defaultdict(list)

    def __call__(self, task: Any, *arguments: Any, **named: Any) -> Any:
        with timed(self.seconds, task.stage.name):
            return super().__call__(task, *arguments, **named)


@contextmanager
def timed(seconds: Seconds, name: str) -> Iterator[None]:
    """Add the processor seconds of this thread in the block."""
    start = time.thread_time()
    yield
    seconds[name].append(time.thread_time() - start)


def main() -> None:
    """Go through the run and print a line at each mark."""
    steps, place = int(sys.argv[1]) if len(sys.argv) > 1 else MARKS[-1], sys.argv[2] if len(sys.argv) > 2 else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        root = Path(directory) / "store"
        session = session_for(root, "long", steps=steps)
        begun, finish = [time.process_time()], loop.finish_step

        def finish_timed(*arguments: Any) -> Any:
            with timed(Timed.seconds, "record"):
                described = finish(*arguments)
            begun.append(time.process_time())
            Timed.seconds["step"].append(begun[-1] - begun[-2])
            if (done := len(begun) - 1) in MARKS:
                print_line(root, done)
            return described

        loop.finish_step, loop.Executor = finish_timed, Timed  # type: ignore[misc]
        with record_run(session):
            loop.loop_train(session)


def print_line(root: Path, done: int) -> None:
    """Print the medians of the last steps, and what is held and stored."""
    medians = {name: statistics.median(each[-WINDOW:]) * 1e3 for name, each in Timed.seconds.items()}
    files = [path.stat().st_size for path in root.rglob("*") if path.is_file()]
    own = psutil.Process().memory_full_info().uss / 1e6
    if done == MARKS[0]:
        print(f"| steps | {' | '.join(f'{name} ms' for name in medians)} | own MB | files | MB |")
        print("|---:" * (len(medians) + 4) + "|")
    cells = [f"{done:,}", *(f"{value:.1f}" for value in medians.values())]
    print(f"| {' | '.join([*cells, f'{own:.0f}', f'{len(files):,}', f'{sum(files) / 1e6:.1f}'])} |", flush=True)


if __name__ == "__main__":
    main()
