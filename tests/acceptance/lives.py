"""Lives of a real run that kills its services or itself, each in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fixtures.driving import ROOT


def live(
    directory: Path,
    temporary: Path,
    model: Path,
    kills: Mapping[str, str],
    overrides: Sequence[str] = (),
    plugins: Path | None = None,
) -> tuple[int, str]:
    """Call the run in a new process; return its status and what it printed. `plugins` is a directory of modules."""
    request = {"overrides": [f"model.path={model}", *overrides], "kills": dict(kills)}
    paths = f"{plugins}:{ROOT}" if plugins else str(ROOT)
    variables = {"PYTHONPATH": paths, "OMP_WAIT_POLICY": "PASSIVE", "TMPDIR": str(temporary)}
    command = [sys.executable, "-P", "-m", "tests.acceptance.program", str(directory), json.dumps(request)]
    with (directory / "flow.log").open("ab") as log:
        status = subprocess.run(command, cwd=ROOT, env=os.environ | variables, stdout=log, stderr=log).returncode
    return status, (directory / "flow.log").read_text()[-8000:]


def lines(path: Path) -> list[Any]:
    """Return the lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
