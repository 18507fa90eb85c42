"""The taskset that verifiers loads under the id `sample_reverse_text`."""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from sample_reverse_text.texts import prompt, similarity, texts


class ReverseTextData(vf.TaskData):
    """One text to write backwards."""

    text: str
    """The text as given."""
    answer: str = ""
    """The text reversed, for people who read replies; empty in tasks that were recorded without it."""


class ReverseTextTask(vf.Task[ReverseTextData]):
    """Scores the last reply against the reversed text."""

    @property
    def key(self) -> str:
        """The text itself names the task: stable whatever its place in the list."""
        return self.data.text

    @vf.reward
    async def similarity(self, task: ReverseTextData, trace: vf.Trace) -> float:
        """The share of the reversed text that the tagged answer has, from 0 to 1."""
        return similarity(trace.last_reply, task.text[::-1])

    @vf.metric
    async def exact(self, task: ReverseTextData, trace: vf.Trace) -> float:
        """1 where the tagged answer is the reversed text, else 0."""
        return float(similarity(trace.last_reply, task.text[::-1]) == 1.0)


class ReverseTextConfig(vf.TasksetConfig):
    """What texts are generated."""

    num_examples: int = Field(2000, ge=1)
    """Texts generated; all differ."""
    min_length: int = Field(3, ge=1)
    """Fewest characters of a text."""
    max_length: int = Field(6, ge=1)
    """Most characters of a text."""
    seed: int = 0
    """Another seed, other texts."""


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Generated texts to write backwards."""

    def load(self) -> Iterator[ReverseTextTask]:
        """Yield one task for each generated text."""
        config = self.config
        for text in texts(config.num_examples, config.min_length, config.max_length, config.seed):
            yield ReverseTextTask(ReverseTextData(prompt=prompt(text), text=text, answer=text[::-1]), config.task)
