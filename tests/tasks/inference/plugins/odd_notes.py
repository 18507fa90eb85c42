"""A taskset whose rollouts leave notes of every kind: what JSON has no form for, and what no wire can carry."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

NOTES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True]},
    "number": float("nan"),
    "bytes": b"\xff\x00",
    "keys": {1: "one"},
    "object": object(),
    "half": "\ud83d",
}


class OddData(vf.TaskData):
    note: str
    unheard_of: dict[str, Any] = Field(default_factory=lambda: {"kept": [1, None, "é"]})


class OddTask(vf.Task[OddData]):
    @property
    def key(self) -> str:
        return self.data.note

    @vf.reward
    async def noted(self, task: OddData, trace: vf.Trace) -> float:
        trace.info["note"] = NOTES[task.note]
        return 1.0


class OddTaskset(vf.Taskset[OddTask, vf.TasksetConfig]):
    def load(self) -> Iterator[OddTask]:
        for note in NOTES:
            yield OddTask(OddData(prompt="hello", note=note), self.config.task)


__all__ = ["OddTaskset"]
