"""Faults of the program itself, which the tests of faults must catch: `make sabotage` tries those of `sabotages.toml`.

Each is planted in a copy of the checkout, alone, and the tests that are named with it run there until one fails.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutate import copy_checkout

ROOT = Path(__file__).parents[2]
TESTS_FAILED = 1
"""Status of pytest where tests ran and failed: any other end catches nothing."""


@dataclass(frozen=True)
class Sabotage:
    """A fault of one file of the program, and where the tests lie that must catch it."""

    name: str
    file: str
    edits: list[list[str]]
    tests: list[str]
    only: str = ""


def sabotages():
    """Return all of them, as they are listed."""
    listed = tomllib.loads(Path(__file__).with_name("sabotages.toml").read_text(encoding="utf-8"))
    return [Sabotage(**each) for each in listed["sabotage"]]


def sabotaged(text, edits):
    """Return the text of a file with each edit made once; AssertionError where what goes does not stand there once."""
    for before, after in edits:
        assert text.count(before) == 1, f"stands {text.count(before)} times in the file: {before!r}"
        text = text.replace(before, after)
    return text


def caught(copy, sabotage):
    """Plant a fault in a copy of the checkout, run its tests, mend it; say whether and by what it was caught."""
    file = copy / sabotage.file
    good = file.read_text(encoding="utf-8")
    file.write_text(sabotaged(good, sabotage.edits), encoding="utf-8")
    chosen = ["-k", sabotage.only] if sabotage.only else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "fault", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(
        [*command, *sabotage.tests],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    file.write_text(good, encoding="utf-8")
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == TESTS_FAILED, failed[0] if failed else done.stdout[-300:]


def main(names):
    """Try every sabotage, or those whose names hold one of some words; return 0 if all were caught."""
    tried = [each for each in sabotages() if not names or any(name in each.name for name in names)]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="stagecoach-sabotage-") as scratch:
        copy_checkout(copy := Path(scratch, "checkout"))
        for each in tried:
            seen, by = caught(copy, each)
            missed += not seen
            print(f"| {each.name} | {'caught' if seen else 'MISSED'} | `{by}` |", flush=True)
    print(f"{len(tried) - missed} of {len(tried)} caught")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
