"""What a sampler is asked for and what it answers."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from configs.sections import AssignmentConfig


@dataclass(frozen=True)
class SampleRequest:
    """The examples that one batch of a step wants of one environment."""

    environment: str
    examples: Sequence[str]
    """All that there are, in table order, each once."""
    turns: Sequence[int]
    """Which turns of the environment these are, counted over the whole run: one example for each."""
    seed: int
    step: int
    batch: int
    taken: Set[str]
    """Examples that the step has tried in earlier batches; others come first."""
    difficulties: Mapping[str, float]
    """The mean reward of the last group of each example that was scored."""


Sampler = Callable[[SampleRequest, AssignmentConfig, Any], list[str]]
"""Returns an example for each turn, under the assignment section and the sampler's own."""
