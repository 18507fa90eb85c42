"""The taskset that verifiers loads under the id `sample_debate`."""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from sample_debate.claims import Claim, claims


class DebateData(vf.TaskData):
    """One claim."""

    digit: str
    """What is claimed to be in the list."""
    numbers: str
    """The list, its digits apart by spaces."""
    truth: str
    """The member who is right."""


class DebateTask(vf.Task[DebateData]):
    """A claim to debate; what it is worth is the episode's to say."""

    @property
    def key(self) -> str:
        """Digit and list tell a claim from all others: stable whatever its place in the list."""
        return f"{self.data.digit} in {self.data.numbers}"


class DebateConfig(vf.TasksetConfig):
    """What claims are generated."""

    num_examples: int = Field(1000, ge=1)
    """Claims generated; all differ, and half of them are true."""
    seed: int = 0
    """Another seed, other claims."""


class DebateTaskset(vf.Taskset[DebateTask, DebateConfig]):
    """Generated claims."""

    def load(self) -> Iterator[DebateTask]:
        """Yield one task for each claim."""
        for claim in claims(self.config.num_examples, self.config.seed):
            yield DebateTask(data_of(claim), self.config.task)


def data_of(claim: Claim) -> DebateData:
    """Return a claim as a task's data; the arena opens every conversation, so there is no prompt."""
    return DebateData(digit=claim.digit, numbers=claim.listed, truth=claim.truth)
