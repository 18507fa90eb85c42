"""A taskset whose tasks misbehave in the way that their own data says, more rudely than those of faulty_taskset."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class MisbehavingData(vf.TaskData):
    fault: str
    unknown: dict[str, Any] | None = None
    """Nothing that the rest of the world knows of."""


class MisbehavingConfig(vf.TaskConfig):
    directory: str = "."
    """Where a task leaves what the test looks for."""
    name: str = ""
    """Of the environment, for its log."""


class MisbehavingTask(vf.Task[MisbehavingData, vf.State, MisbehavingConfig]):
    @property
    def key(self) -> str:
        return self.data.fault

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.fault == "holds":
            logging.getLogger("misbehaving").info("holding %s in process %d", self.config.name, os.getpid())
            await asyncio.sleep(3600)

    @vf.reward
    async def outcome(self, task: MisbehavingData, trace: vf.Trace, runtime: vf.Runtime) -> Any:
        logging.getLogger("misbehaving").info("scoring %s in process %d", task.fault, os.getpid())
        act = getattr(self, task.fault.partition(" ")[0], None)
        found = None if act is None else act(trace, runtime)
        return 0.5 if found is None else await found

    def _path(self, name: str) -> Path:
        return Path(self.config.directory, name)

    async def infinite(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return float("inf")

    async def nothing(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        return None

    async def words(self, trace: vf.Trace, runtime: vf.Runtime) -> str:
        return "good"

    def memory(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        raise MemoryError("planted")

    def cancels(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        raise asyncio.CancelledError

    def unserialisable(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.info["connection"] = object()

    def partly(self, trace: vf.Trace, runtime: vf.Runtime) -> Any:
        """Zero, one, an error and infinity, for the members of a group in the order in which they are scored."""
        place = next(number for number in range(9) if self._first(str(number)))
        if place == 2:
            raise LookupError("planted")
        return self.number((0.0, 1.0, 0.0, float("inf"))[place])

    async def number(self, value: float) -> float:
        return value

    def floods(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        for _ in range(200):
            print("flood " * 1000)
        sys.stdout.flush()

    def leaks(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        self._path("leaked").write_text(str(child.pid))

    async def program(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        script = f"sleep 3601 & echo $! $$ > {self._path('tree').resolve()}; wait"
        await runtime.run(["sh", "-c", script], {})
        return 0.5

    def blocks(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self._first():
            while True:
                time.sleep(0.01)

    def leaves(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self._first():
            sys.exit("planted")

    def _first(self, what: str = "once") -> bool:
        """Whether this is the first time that the task is scored so, in whatever process."""
        try:
            self._path(f"{self.data.fault}.{what}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class MisbehavingConfigOfSet(vf.TasksetConfig):
    faults: list[str]
    task: MisbehavingConfig = MisbehavingConfig()


class MisbehavingTaskset(vf.Taskset[MisbehavingTask, MisbehavingConfigOfSet]):
    def load(self) -> Iterator[MisbehavingTask]:
        for fault in self.config.faults:
            if fault == "lingers":
                child = subprocess.Popen(["sleep", "3600"])  # with the files that this process writes to
                Path(self.config.task.directory, "lingers").write_text(str(child.pid))
            image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL}}]}
            prompt: Any = [image] if fault == "image" else "x" * 10
            extra = {"unknown": {"depth": [1, None]}} if fault == "extra" else {}
            yield MisbehavingTask(MisbehavingData(prompt=prompt, fault=fault, **extra), self.config.task)


__all__ = ["MisbehavingTaskset"]
