"""The taskset that verifiers loads under the id `sample_calc_tools`."""

import json
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.mcp import SharedToolsetConfig

from sample_calc_tools.server import CalcServer
from sample_calc_tools.sums import TOOL, Chain, chains, is_right, progress, prompt


class CalcToolsData(vf.TaskData):
    """One chain of operations to work out."""

    first: int
    """The number to start from."""
    operations: list[str]
    """What to apply to it, in order, such as `+5`."""

    @property
    def chain(self) -> Chain:
        """The chain, with its calls and results."""
        return Chain(self.first, tuple(self.operations))


class CalcToolsTask(vf.Task[CalcToolsData]):
    """Scores the calls that were made and the last reply."""

    @property
    def key(self) -> str:
        """The request itself names the task: stable whatever its place in the list."""
        return prompt(self.data.chain)

    @vf.reward(weight=0.5)
    async def answer(self, task: CalcToolsData, trace: vf.Trace) -> float:
        """1 where the tagged answer of the last reply is the chain's last result, else 0."""
        return float(is_right(trace.last_reply, task.chain.results[-1]))

    @vf.reward(weight=0.5)
    async def steps(self, task: CalcToolsData, trace: vf.Trace) -> float:
        """The share of the chain's operations that the calculator was asked for, in order."""
        return progress(asked(trace), task.chain.calls) / len(task.operations)

    @vf.metric
    async def num_calls(self, task: CalcToolsData, trace: vf.Trace) -> float:
        """Calls of the calculator, sensible or not."""
        return float(len(asked(trace)))


def asked(trace: vf.Trace) -> list[str]:
    """What the calculator was asked, in the conversation as the model last saw it; a call without one is empty."""
    messages = trace.branches[-1].messages if trace.branches else []
    calls = [call for message in messages if message.role == "assistant" for call in message.tool_calls or []]
    return [_expression(call.arguments) for call in calls if call.name == TOOL]


def _expression(arguments: str) -> str:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return ""
    return str(given.get("expression", "")) if isinstance(given, dict) else ""


class CalcToolsConfig(vf.TasksetConfig):
    """What chains are generated."""

    num_examples: int = Field(1000, ge=1)
    """Chains generated; all differ."""
    num_calls: int = Field(2, ge=1)
    """Operations of a chain: calls that it takes, so that a rollout takes one model turn more."""
    seed: int = 0
    """Another seed, other chains."""


class CalcToolsTaskset(vf.Taskset[CalcToolsTask, CalcToolsConfig]):
    """Generated chains to work out."""

    def load(self) -> Iterator[CalcToolsTask]:
        """Yield one task for each chain."""
        for chain in chains(self.config.num_examples, self.config.num_calls, self.config.seed):
            data = CalcToolsData(prompt=prompt(chain), first=chain.first, operations=list(chain.operations))
            yield CalcToolsTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: CalcToolsConfig) -> list[vf.Toolset]:
        """One calculator for all rollouts of an environment worker."""
        return [CalcServer(SharedToolsetConfig())]
