"""Measures how long commands take: `python -m benchmarks.response_times [ROOT] [--steps 1000] [--repeats 5]`.

Each command runs in a fresh process; of several runs the least counts, for whatever else the machine does only adds.
Processor seconds are user and system time of all threads. Without ROOT a store is made for it, which takes minutes.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.fixtures.large_store import make
from storage.read.frames import Frames, existing_store

COMMANDS = (
    "--help",
    "show --help",
    "check demo",
    "sql select+count(*)+from+traces",
    "show large",
    "runs",
    "trace TRACE --run large",
    "why TRACE",
    "lineage TRACE",
    "diff large large-again",
)
WITHOUT_STORE = ("--help", "show --help", "check demo")


def main() -> None:
    """Print a line of a table in markdown for each command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("root", type=Path, nargs="?", default=None)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = given.root or Path(directory) / "store"
        if given.root is None:
            make(root, steps=given.steps, rollouts=16, group_size=8, fork=given.steps - 5, maintained=True)
        print("| command | processor seconds | wall-clock seconds |\n|---|---:|---:|")
        trace = (
            Frames(existing_store(str(root))).run("large")["traces"].select("trace_id").head(1).collect()["trace_id"][0]
        )
        for command in COMMANDS:
            words = [word.replace("+", " ").replace("TRACE", str(trace)) for word in command.split()]
            place = [] if command in WITHOUT_STORE else ["--store", str(root)]
            taken = [measure([*words, *place]) for _ in range(given.repeats)]
            processor, clock = (min(column) for column in zip(*taken, strict=True))
            print(f"| `{command.replace('+', ' ')}` | {processor:.2f} | {clock:.2f} |", flush=True)


def measure(argv: list[str]) -> tuple[float, float]:
    """Return the processor seconds and the wall-clock seconds of one call of a command in a process of its own."""
    # As a user has it: a module is compiled by the first call, and read by those after it.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "flows.cli", *argv]
    subprocess.run(command, stdout=subprocess.DEVNULL, env=variables, check=True)
    clock, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, clock


if __name__ == "__main__":
    main()
