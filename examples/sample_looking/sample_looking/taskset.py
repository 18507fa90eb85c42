"""The taskset that verifiers loads under the id `sample_looking`."""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.types import ImageUrlContentPart, ImageUrlSource, TextContentPart, UserMessage

from sample_looking.pictures import REQUEST, Picture, is_right, pictures, shuffled


class LookingData(vf.TaskData):
    """One picture, and how many squares it is said to have."""

    count: int
    """The number that is right."""


class LookingTask(vf.Task[LookingData]):
    """Scores the last reply."""

    @property
    def key(self) -> str:
        """The picture names the task: stable whatever its place in the list."""
        return self.data.model_dump_json(include={"prompt"})

    @vf.reward
    async def right(self, task: LookingData, trace: vf.Trace) -> float:
        """1 where the last reply is the number of squares, else 0."""
        return float(is_right(trace.last_reply, task.count))


class LookingConfig(vf.TasksetConfig):
    """What pictures are generated."""

    num_examples: int = Field(2000, ge=1)
    """Pictures generated."""
    seed: int = Field(0, ge=0)
    """Another seed, other pictures."""
    shuffled: bool = False
    """Whether pictures get the numbers of others, so that nobody can be right more often than by chance."""


class LookingTaskset(vf.Taskset[LookingTask, LookingConfig]):
    """Generated pictures whose squares are to be counted."""

    def load(self) -> Iterator[LookingTask]:
        """Yield one task for each picture."""
        config = self.config
        found = list(pictures(config.num_examples, config.seed))
        for picture in shuffled(found, config.seed) if config.shuffled else found:
            data = LookingData(prompt=request(picture), count=picture.count)
            yield LookingTask(data, config.task)


def request(picture: Picture) -> list[UserMessage]:
    """Return the prompt: the picture, then the question, which is the same for all."""
    shown = ImageUrlContentPart(image_url=ImageUrlSource(url=picture.url))
    return [UserMessage(content=[shown, TextContentPart(text=REQUEST)])]
