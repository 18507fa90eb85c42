"""A taskset whose examples can be read and whose environment cannot be made: a server would not load it."""

import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnv


class PlainTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def outcome(self, task: vf.TaskData, trace: vf.Trace) -> float:
        return 0.0


class PlainTaskset(vf.Taskset[PlainTask, vf.TasksetConfig]):
    def load(self) -> list[PlainTask]:
        return [PlainTask(vf.TaskData(prompt="x", idx=0), self.config.task)]


class UnloadableEnv(SingleAgentEnv):
    def __init__(self, *arguments: object, **settings: object) -> None:
        raise RuntimeError("the planted wrong setting")


__all__ = ["PlainTaskset", "UnloadableEnv"]
