"""A taskset with an environment of its own: two rivals answer the same prompt, and a judge reads what they said."""

from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers.v1.agent import Agents

FAULTS = ("none", "member", "run", "finalize")


class RivalsData(vf.TaskData):
    fault: str = "none"


class RivalsTask(vf.Task[RivalsData]):
    @vf.reward
    async def answered(self, task: RivalsData, trace: vf.Trace) -> float:
        if task.fault == "member" and trace.agent.name == "second":
            raise KeyError("planted")
        return 0.25


class RivalsTaskset(vf.Taskset[RivalsTask, vf.TasksetConfig]):
    def load(self) -> Iterator[RivalsTask]:
        for fault in FAULTS:
            yield RivalsTask(RivalsData(id=fault, prompt="say something", fault=fault), self.config.task)


class RivalsConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig(max_turns=3)
    num_rounds: int = 1


class RivalsEnv(vf.Env[RivalsConfig]):
    async def run(self, task: vf.Task, agents: Agents) -> None:
        for _ in range(self.config.num_rounds):
            for rival in (agents.first, agents.second):
                trace = await rival.run(task)
                trace.info["learner_seat"] = "first"
        if task.data.fault == "run":
            raise ValueError("the judge is ill")
        await agents.judge.run(vf.Task(vf.TaskData(prompt="who was better?")))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        if task.data.fault == "finalize":
            raise ValueError("nobody wins")
        for trace in episode.traces:
            if trace.agent.name != "judge" and trace.ok:
                trace.record_reward("won", float(trace.agent.name == "first"))


__all__ = ["RivalsEnv", "RivalsTaskset"]
