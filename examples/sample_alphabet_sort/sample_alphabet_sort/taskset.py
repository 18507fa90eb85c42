"""The taskset that verifiers loads under the id `sample_alphabet_sort`."""

from collections.abc import Iterator
from hashlib import sha256

import verifiers.v1 as vf
from pydantic import Field, SerializeAsAny

from sample_alphabet_sort.lists import NAMES, Conversation, Limits, asked, conversations, score, similarity

LONGEST_KEY = 1000
"""Characters."""


class AlphabetSortData(vf.TaskData):
    """One conversation; the prompt holds its first turn."""

    turns: list[list[str]]
    """The names that the user gives, turn by turn."""

    @property
    def answers(self) -> list[list[str]]:
        """What the list is after each turn."""
        return Conversation(tuple(map(tuple, self.turns))).answers


class AlphabetSortTaskConfig(vf.TaskConfig):
    """How replies are read and scored."""

    tag: str = Field("sorted", pattern=r"^\w+$")
    """The tag that a list stands in."""
    power: float = Field(1.0, gt=0)
    """A turn's similarity is taken to this power: larger pays less for a list that is nearly right."""


class AlphabetSortTask(vf.Task[AlphabetSortData, vf.State, AlphabetSortTaskConfig]):
    """Scores the reply to every turn of the user."""

    @property
    def key(self) -> str:
        """The names in their order tell a conversation from all others, whatever its place in the list.

        Of long lists a digest stands for what follows the first names.
        """
        names = "; ".join(" ".join(names) for names in self.data.turns)
        return names if len(names) <= LONGEST_KEY else f"{names[:40]}... {sha256(names.encode()).hexdigest()[:16]}"

    @vf.reward
    async def similarity(self, task: AlphabetSortData, trace: vf.Trace) -> float:
        """The mean over the user's turns of how close the reply's list is to the right one."""
        return score(replies(trace), task.answers, self.config.tag, self.config.power)

    @vf.metric
    async def exact(self, task: AlphabetSortData, trace: vf.Trace) -> float:
        """The share of the user's turns whose list is right."""
        pairs = zip(replies(trace), task.answers, strict=False)
        return sum(similarity(said, answer, self.config.tag) == 1.0 for said, answer in pairs) / len(task.turns)


def replies(trace: vf.Trace) -> list[str]:
    """The model's last message after each turn of the user, in the conversation as the model last saw it."""
    said: list[str] = []
    for message in trace.branches[-1].messages if trace.branches else []:
        if message.role == "user":
            said.append("")
        elif message.role == "assistant" and said:
            said[-1] = message.content or ""
    return said


class AlphabetSortConfig(vf.TasksetConfig):
    """What conversations are generated."""

    task: SerializeAsAny[AlphabetSortTaskConfig] = AlphabetSortTaskConfig()
    """How replies are read and scored."""
    num_examples: int = Field(1000, ge=1)
    """Conversations generated; all differ."""
    min_turns: int = Field(2, ge=1)
    """Fewest turns of the user; the same as `max_turns` makes all conversations one length."""
    max_turns: int = Field(3, ge=1)
    """Most turns of the user."""
    min_words: int = Field(2, ge=1)
    """Fewest names of a turn."""
    max_words: int = Field(4, ge=1)
    """Most names of a turn."""
    num_names: int = Field(len(NAMES), ge=1)
    """Names that are drawn from; up to 26 no two begin with one letter, and above 104 there are double names."""
    seed: int = 0
    """Another seed, other conversations."""

    @property
    def limits(self) -> Limits:
        """How long conversations and lists are."""
        return Limits(self.min_turns, self.max_turns, self.min_words, self.max_words, self.num_names)


class AlphabetSortTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    """Generated conversations."""

    def load(self) -> Iterator[AlphabetSortTask]:
        """Yield one task for each conversation. Raises ValueError where the settings leave none."""
        for each in conversations(self.config.num_examples, self.config.limits, self.config.seed):
            prompt = asked(each.turns[0], self.config.task.tag, first=True)
            data = AlphabetSortData(prompt=prompt, turns=[list(names) for names in each.turns])
            yield AlphabetSortTask(data, self.config.task)
