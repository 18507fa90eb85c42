"""A taskset whose tasks go wrong in the way that their own data says."""

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

FAULTS = ("none", "raises", "hangs", "nan", "too_long", "stops_at_setup")


class FaultyData(vf.TaskData):
    fault: str


class FaultyTask(vf.Task[FaultyData]):
    @property
    def key(self) -> str:
        return self.data.fault

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.fault == "stops_at_setup":
            raise FileNotFoundError("the planted file")

    @vf.reward
    async def outcome(self, task: FaultyData, trace: vf.Trace) -> float:
        if task.fault == "raises":
            raise KeyError("planted")
        if task.fault == "hangs":
            await asyncio.sleep(3600)
        return float("nan") if task.fault == "nan" else 0.5


class FaultyTaskset(vf.Taskset[FaultyTask, vf.TasksetConfig]):
    def load(self) -> Iterator[FaultyTask]:
        for fault in FAULTS:
            prompt = "x" * (5000 if fault == "too_long" else 10)
            yield FaultyTask(FaultyData(prompt=prompt, fault=fault), self.config.task)


__all__ = ["FaultyTaskset"]
