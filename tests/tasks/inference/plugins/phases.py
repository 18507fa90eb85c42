"""A taskset with phases that take a known time at least, and prompts that already hold a call and its result."""

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

SET_UP, SCORING = 0.3, 0.2
CALL = {"id": "c1", "name": "look", "arguments": '{"at": "x"}'}
PROMPT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "look at x"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "x is 7"},
]


class PhasesTask(vf.Task[vf.TaskData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await asyncio.sleep(SET_UP)

    @vf.reward
    async def slowly(self, trace: vf.Trace) -> float:
        await asyncio.sleep(SCORING)
        return 1.0


class PhasesTaskset(vf.Taskset[PhasesTask, vf.TasksetConfig]):
    def load(self) -> Iterator[PhasesTask]:
        yield PhasesTask(vf.TaskData(id="one", prompt=PROMPT), self.config.task)


__all__ = ["PhasesTaskset"]
