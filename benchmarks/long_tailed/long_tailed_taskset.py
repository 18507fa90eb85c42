"""A taskset whose rollouts wait for a tool as long as each task says: most briefly, a few twenty times as long.

The waiting takes no processor, so that what is measured are the rules of the pipeline and not the machine's cores.
"""

import asyncio
import random
from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers.v1.agent import Agents
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig


class LongTailedData(vf.TaskData):
    """How long the tool of a task takes."""

    seconds: float


class LongTailedTask(vf.Task[LongTailedData]):
    """Scores whatever was said, so that rollouts of a group differ."""

    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        """The share of the last reply that are small letters."""
        reply = trace.last_reply
        return sum("a" <= each <= "z" for each in reply) / max(1, len(reply))


class LongTailedConfig(vf.TasksetConfig):
    """How many tasks, how many of them are long, and how long tools take."""

    num_examples: int = 400
    short_seconds: float = 0.5
    long_seconds: float = 10.0
    long_every: int = 10
    """One task in so many is long, at random places."""


class LongTailedTaskset(vf.Taskset[LongTailedTask, LongTailedConfig]):
    """Tasks of two lengths."""

    def load(self) -> Iterator[LongTailedTask]:
        """Yield the tasks, the same ones each time."""
        config, chance = self.config, random.Random(17)
        for number in range(config.num_examples):
            seconds = config.long_seconds if chance.random() * config.long_every < 1 else config.short_seconds
            yield LongTailedTask(LongTailedData(prompt=f"say {number}", seconds=seconds), config.task)


class LongTailedEnv(vf.Env[SingleAgentEnvConfig]):
    """A reply, the tool, and another reply."""

    async def run(self, task: vf.Task, agents: Agents) -> None:
        """Let the model reply before and after the tool."""
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            await asyncio.sleep(task.data.seconds)
            if not said.terminated:
                await talk.turn("go on")


__all__ = ["LongTailedEnv", "LongTailedTaskset"]
