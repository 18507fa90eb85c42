"""A taskset with an environment of its own: the model answers, is asked once more, and answers again."""

from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers.v1.agent import Agents
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig


class TwoTurnTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class TwoTurnTaskset(vf.Taskset[TwoTurnTask, vf.TasksetConfig]):
    def load(self) -> Iterator[TwoTurnTask]:
        for number in range(4):
            messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": f"first {number}"}]
            yield TwoTurnTask(vf.TaskData(id=f"t{number}", prompt=messages), self.config.task)


class TwoTurnEnv(vf.Env[SingleAgentEnvConfig]):
    async def run(self, task: vf.Task, agents: Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("and again")


__all__ = ["TwoTurnEnv", "TwoTurnTaskset"]
