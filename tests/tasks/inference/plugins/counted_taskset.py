"""A taskset whose tasks take some turns and then go wrong, each time that they are tried, as their own data says."""

import asyncio
import os
from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers.v1.agent import Agents
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.errors import SandboxError


class CountedData(vf.TaskData):
    name: str
    """The fault, and after a blank what tells tasks with the same one apart."""
    turns: int


class CountedTask(vf.Task[CountedData]):
    @property
    def key(self) -> str:
        return self.data.name

    @vf.reward
    async def outcome(self, task: CountedData, trace: vf.Trace) -> float:
        fault = task.name.partition(" ")[0]
        if fault == "dies":
            os._exit(7)
        if fault in ("hangs", "late"):
            await asyncio.sleep(3600)
        if fault in ("raises", "infrastructure"):
            raise {"raises": KeyError, "infrastructure": SandboxError}[fault]("planted")
        return float("nan") if fault == "nan" else float(trace.num_turns)


class CountedConfig(vf.TasksetConfig):
    names: list[str]
    turns: int = 2


class CountedTaskset(vf.Taskset[CountedTask, CountedConfig]):
    def load(self) -> Iterator[CountedTask]:
        for name in self.config.names:
            turns = int(name.split()[-1]) if name.split()[-1].isdigit() else self.config.turns
            limits = vf.TaskTimeout(scoring=0.2) if name.startswith("late") else vf.TaskTimeout()
            data = CountedData(prompt=f"say {name}", name=name, turns=turns, timeout=limits)
            yield CountedTask(data, self.config.task)


class CountedEnv(vf.Env[SingleAgentEnvConfig]):
    async def run(self, task: vf.Task, agents: Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for _ in range(task.data.turns - 1):
                if said.terminated:
                    return
                said = await talk.turn("and again")


__all__ = ["CountedEnv", "CountedTaskset"]
