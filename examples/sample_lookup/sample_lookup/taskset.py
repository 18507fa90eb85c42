"""The taskset that verifiers loads under the id `sample_lookup`."""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from sample_lookup.chains import Chain, chains, is_right, prompt, reached
from sample_lookup.server import LookupServer, StoreConfig


class LookupData(vf.TaskData):
    """One chain to follow; the prompt holds its first name alone."""

    names: list[str]
    """The names from the first to the last."""
    value: str
    """What is under the last name."""


class LookupTask(vf.Task[LookupData]):
    """Scores the entries that were found and the last reply."""

    @property
    def key(self) -> str:
        """The first name tells a chain from all others: stable whatever its place in the list."""
        return self.data.names[0]

    @vf.reward(weight=0.5)
    async def answer(self, task: LookupData, trace: vf.Trace) -> float:
        """1 where the tagged answer of the last reply is the value, else 0."""
        return float(is_right(trace.last_reply, task.value))

    @vf.reward(weight=0.5)
    async def progress(self, task: LookupData, trace: vf.Trace) -> float:
        """The share of the chain's entries that the tool was asked for, in order."""
        return reached(results(trace), task.names, task.value) / len(task.names)

    @vf.metric
    async def num_lookups(self, task: LookupData, trace: vf.Trace) -> float:
        """Calls of the tool that were answered, with an entry or not."""
        return float(len(results(trace)))


def results(trace: vf.Trace) -> list[str]:
    """The text of every tool result in the conversation as the model last saw it."""
    messages = trace.branches[-1].messages if trace.branches else []
    return [str(message.content) for message in messages if message.role == "tool"]


class LookupConfig(vf.TasksetConfig):
    """What store is generated."""

    num_examples: int = Field(1000, ge=1)
    """Chains generated; no name is in two of them."""
    num_hops: int = Field(2, ge=1)
    """Names in a chain: calls that it takes to find the value."""
    seed: int = 0
    """Another seed, another store."""

    def generated(self) -> Iterator[Chain]:
        """Yield the chains."""
        yield from chains(self.num_examples, self.num_hops, self.seed)


class LookupTaskset(vf.Taskset[LookupTask, LookupConfig]):
    """Generated chains to follow."""

    def load(self) -> Iterator[LookupTask]:
        """Yield one task for each chain."""
        for chain in self.config.generated():
            data = LookupData(prompt=prompt(chain.names[0]), names=list(chain.names), value=chain.value)
            yield LookupTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: LookupConfig) -> list[vf.Toolset]:
        """One server of the store for all rollouts of an environment worker."""
        names = set(StoreConfig.model_fields) & set(LookupConfig.model_fields)
        return [LookupServer(StoreConfig(**config.model_dump(include=names)))]
