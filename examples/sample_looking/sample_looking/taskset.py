"""The taskset that verifiers loads under the id `sample_looking`."""

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.types import ImageUrlContentPart, ImageUrlSource, TextContentPart, UserMessage

from sample_looking.pictures import REQUEST, Picture, is_right, picture_names, pictures, request_by_name, shuffled
from sample_looking.server import PicturesConfig, PictureServer


class LookingData(vf.TaskData):
    """Pictures, and how many squares each is said to have."""

    counts: list[int]
    """The numbers that are right, one for each turn of the user."""
    later: list[UserMessage] = Field(default_factory=list)
    """What the user says after the first reply, one message a turn."""


class LookingTask(vf.Task[LookingData]):
    """Scores the replies."""

    @property
    def key(self) -> str:
        """The pictures name the task: stable whatever its place in the list."""
        return self.data.model_dump_json(include={"prompt", "later"} if self.data.later else {"prompt"})

    @vf.reward
    async def right(self, task: LookingData, trace: vf.Trace) -> float:
        """The share of the user's turns to which the last reply is the number of squares."""
        said = replies(trace)
        return sum(is_right(*each) for each in zip(said, task.counts, strict=False)) / len(task.counts)


def replies(trace: vf.Trace) -> list[str]:
    """The last reply before each further turn of the user, and that at the end; calls of a tool are none."""
    found: list[str] = []
    for message in trace.branches[-1].messages if trace.branches else []:
        if message.role == "user":
            found.append("")
        elif message.role == "assistant" and found and not message.tool_calls:
            found[-1] = str(message.content or "")
    return found


class LookingConfig(vf.TasksetConfig):
    """What pictures are generated, and who shows them."""

    num_examples: int = Field(2000, ge=1)
    """Tasks generated."""
    num_pictures: int = Field(1, ge=1)
    """Pictures of a task; the user asks about each in a turn of its own."""
    tool: bool = False
    """Whether the user only names a picture, and the model has to look at it with the tool `look`."""
    seed: int = Field(0, ge=0)
    """Another seed, other pictures."""
    shuffled: bool = False
    """Whether pictures get the numbers of others, so that nobody can be right more often than by chance."""


class LookingTaskset(vf.Taskset[LookingTask, LookingConfig]):
    """Generated pictures whose squares are to be counted."""

    def load(self) -> Iterator[LookingTask]:
        """Yield the tasks."""
        config = self.config
        number = config.num_examples * config.num_pictures
        found = list(pictures(number, config.seed))
        if config.shuffled:
            found = shuffled(found, config.seed)
        names = picture_names(number, config.seed) if config.tool else [""] * number
        asked = [request(*each) for each in zip(found, names, strict=True)]
        for first in range(0, number, config.num_pictures):
            turns = slice(first, first + config.num_pictures)
            counts = [picture.count for picture in found[turns]]
            data = LookingData(prompt=asked[first : first + 1], later=asked[turns][1:], counts=counts)
            yield LookingTask(data, config.task)

    @classmethod
    def toolsets(cls, config: LookingConfig) -> list[vf.Toolset]:
        """One server of the pictures for all rollouts of an environment worker, where a tool shows them."""
        names = set(PicturesConfig.model_fields) & set(LookingConfig.model_fields)
        return [PictureServer(PicturesConfig(**config.model_dump(include=names)))] if config.tool else []


def request(picture: Picture, name: str = "") -> UserMessage:
    """Return what the user says: the picture and the question, which is the same for all, or the picture's name."""
    if name:
        return UserMessage(content=request_by_name(name))
    shown = ImageUrlContentPart(image_url=ImageUrlSource(url=picture.url))
    return UserMessage(content=[shown, TextContentPart(text=REQUEST)])
