"""Mutation testing of what credits, masks, packs, weighs and scores: `make mutate` writes build/mutation.md.

mutmut (section `tool.mutmut` of pyproject.toml) runs in a copy of the checkout, so that nothing is left in it.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from tests.mutation.report import GROUPS, Survivor, group_of, module_of, page

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "build/mutation.md"
COPIED = (
    "pyproject.toml",
    "stagecoach.py",
    "benchmarks",
    "configs",
    "docs",
    "examples",
    "flows",
    "storage",
    "tasks",
    "tests",
)
REASONS = Path(__file__).with_name("equivalent.toml")


def main(names):
    """Run mutmut on every mutant, or on those of these names, and tell what was found; the page is of all of them.

    Returns 0 if enough mutants were killed in every group of modules.
    """
    with tempfile.TemporaryDirectory(prefix="stagecoach-mutants-") as scratch:
        copy = Path(scratch) / "checkout"
        copy_checkout(copy)
        # Without a TMPDIR, tests keep files in memory and drop them at the end of each of the sessions within mutmut.
        place = Path(scratch) / "files"
        place.mkdir()
        _mutmut(copy, "run", *names, TMPDIR=str(place))
        text, enough = report(copy)
    print(text)
    if not names:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(text, encoding="utf-8")
    return 0 if enough else 1


def report(copy):
    """Return the report on the mutants that were run in a copy of the checkout, and whether enough were killed."""
    every = statuses(_mutmut(copy, "results", "--all", "true", quiet=True))
    found = {name: status for name, status in every.items() if status != "not checked"}
    survivors = [_survivor(copy, name) for name, status in found.items() if status not in ("killed", "timeout")]
    machine = f"{os.cpu_count()} {platform.machine()} cores, Python {platform.python_version()}"
    return page(counted(found), survivors, f"{datetime.now(UTC):%Y-%m-%d}, {machine}", len(every) - len(found))


def statuses(printed):
    """Return the status of each mutant by name, as `mutmut results` prints them."""
    lines = (line.strip().rpartition(": ") for line in printed.splitlines() if "__mutmut_" in line)
    return {name: status for name, _, status in lines}


def counted(found):
    """Return how many mutants of each module have which status, modules in the order of the report."""
    modules = sorted({module_of(name) for name in found}, key=lambda module: (GROUPS.index(group_of(module)), module))
    return {
        module: Counter(status for name, status in found.items() if module_of(name) == module) for module in modules
    }


def _survivor(copy, name):
    module, _, rest = name.partition("__mutmut_")[0].partition(".x")
    function = f"{module}.{rest[1:].replace('ǁ', '.')}"
    removed, added = changes(_mutmut(copy, "show", name, quiet=True))
    known = tomllib.loads(REASONS.read_text(encoding="utf-8"))["equivalent"]
    reasons = [each["why"] for each in known if each["function"] == function and added in each["lines"]]
    return Survivor(module, function, removed, added, "".join(reasons[:1]))


def changes(shown):
    """Return what a mutant removed and what it added, each on one line, as `mutmut show` prints it."""
    lines = [line for line in shown.splitlines() if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")]
    removed, added = (" ".join(" ".join(line[1:] for line in lines if line[0] == sign).split()) for sign in "-+")
    return removed, added


def copy_checkout(target):
    """Copy what the tests need of the checkout, so that it can be changed there."""
    target.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
            shutil.copytree(source, target / name, ignore=ignore)
        else:
            shutil.copy(source, target)


def _mutmut(copy, *arguments, quiet=False, **variables):
    program = Path(sys.executable).with_name("mutmut")
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        [program, *arguments], cwd=copy, env=environment, stdout=subprocess.PIPE if quiet else None, check=True
    )
    return done.stdout.decode() if quiet else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
