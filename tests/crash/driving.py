"""Runs the program, kills included, and looks at what it left."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
NAME = "run"
SECONDS = 280
SETTINGS = (
    "seed=7",
    "steps=2",
    "assignment.groups_per_step=3",
    "assignment.group_size=4",
    "rollout.max_tokens=16",
    "engine.max_model_len=64",
    "packing.tokens_per_row=64",
    "evaluation.every=0",
)


Found = TypeVar("Found")


def side_by_side(*stories: Callable[[], Found]) -> list[Found]:
    """Live what has nothing to do with each other at a time, for each leaves a core idle; return what each returned."""
    with ThreadPoolExecutor(len(stories)) as pool:
        return [each.result() for each in [pool.submit(story) for story in stories]]


@dataclass(frozen=True)
class Life:
    """How one process of a run ended, and what it said."""

    status: int
    output: str
    moments: tuple[str, ...]
    sampled: tuple[str, ...]
    """The groups that this process sampled, committed or not."""
    receipts: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Driven:
    """A run in a directory of its own, lived in one process after another."""

    directory: Path
    overrides: tuple[str, ...]

    @property
    def store(self) -> Path:
        """The root of the run's store."""
        return self.directory / "store"

    @property
    def outcome(self) -> Any:
        """What the last process that came to the end of the run made; a list where it did replays."""
        found: Any = json.loads((self.directory / "outcome.json").read_text())
        return found

    def live(
        self,
        kill: str = "",
        *,
        stop: str = "",
        name: str = NAME,
        prefect: bool = False,
        backwards: bool = False,
        overrides: Sequence[str] = (),
        replays: Sequence[Mapping[str, Any]] = (),
        path: Path | None = None,
    ) -> Life:
        """Call the run in a new process, which dies at the moment `kill`, if any, and return how it went.

        At the moment `stop` its learner is stopped, as SIGSTOP does. With `prefect` it is a flow with a real Prefect
        server; `backwards` samples the groups in reverse order. With `replays` the process does those instead. `path`
        is a directory of modules that come before all others.
        """
        for noted in ("moments", "sampled", "receipt"):
            (self.directory / f"{noted}.jsonl").unlink(missing_ok=True)
        request = {"overrides": [*self.overrides, *overrides], "kill": kill, "stop": stop, "name": name}
        request |= {"prefect": prefect, "backwards": backwards, "replays": list(replays)}
        command = [sys.executable, "-P", "-m", "tests.crash.program", str(self.directory), json.dumps(request)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{path}:{ROOT}" if path else str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        moments, sampled, receipts = (self._lines(name) for name in ("moments", "sampled", "receipt"))
        return Life(done.returncode, done.stdout + done.stderr, tuple(moments), tuple(sampled), tuple(receipts))

    def _lines(self, name: str) -> list[Any]:
        path = self.directory / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
