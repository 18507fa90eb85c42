"""A taskset with an environment of its own: two agents answer, a critic has a task of its own, and one of them wins."""

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers.v1.agent import Agents
from verifiers.v1.judge import Judge

FAULTS = ("none", "raises", "nan", "hangs", "state", "judge", "worse")


class DuelData(vf.TaskData):
    fault: str = "none"


class DuelTask(vf.Task[DuelData]):
    """Longer answers are better; a fault of the data makes scoring fail in its own way."""

    @vf.reward(weight=2.0)
    async def length(self, task: DuelData, trace: vf.Trace) -> float:
        if task.fault == "raises":
            raise KeyError("planted")
        if task.fault == "hangs":
            await asyncio.sleep(3600)
        if task.fault == "state":
            return float(len(trace.state.artifacts))
        if task.fault == "judge":
            await Judge().complete("how good is this?", trace=trace)
        return float("nan") if task.fault == "nan" else float(len(trace.last_reply))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class CriticTask(vf.Task[vf.TaskData]):
    """The critic's own task, which the environment makes; it takes more than data."""

    def __init__(self, data: vf.TaskData, notes: list[str]) -> None:
        super().__init__(data)
        self.notes = notes

    @vf.reward
    async def brevity(self, trace: vf.Trace) -> float:
        return 1.0 / len(trace.last_reply)


class DuelTaskset(vf.Taskset[DuelTask, vf.TasksetConfig]):
    def load(self) -> Iterator[DuelTask]:
        for fault in FAULTS:
            yield DuelTask(DuelData(id=fault, prompt="say much", fault=fault), self.config.task)


class DuelConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig()
    right: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class DuelEnv(vf.Env[DuelConfig]):
    async def run(self, task: vf.Task, agents: Agents) -> None:
        await agents.left.run(task)
        await agents.right.run(task)
        await agents.critic.run(CriticTask(vf.TaskData(prompt="judge them"), notes=[]))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        if task.data.fault == "worse":
            raise ValueError("nobody wins")
        players = [trace for trace in episode.traces if trace.agent.name != "critic"]
        best = max(trace.reward for trace in players)
        for trace in players:
            trace.record_reward("won", float(trace.reward == best))


__all__ = ["DuelEnv", "DuelTaskset"]
