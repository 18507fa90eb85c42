"""SeatBindings: which models play the seats of an episode, as the functions of environments say.

RolloutRunner asks for each rollout, in the sampler's event loop, and the preflight for the first episodes.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from configs.environments import POLICY
from configs.errors import did_you_mean
from tasks.inference.trace_rows.rows import Row
from tasks.runtime.imports import load_function

if TYPE_CHECKING:
    from configs.environments import EnvironmentConfig


class UnknownPlayer(ValueError):
    """A model or a seat does not exist."""


@dataclass(frozen=True)
class EpisodeInfo:
    """An episode that will be sampled, for a function that names the models of its seats."""

    environment: str
    example_id: str
    task: Row
    """The data of the example's task."""
    step: int
    """The step that the episode is sampled for; of an evaluation, the policy's version."""
    rollout: int
    """Its number in its group, from 0."""
    seed: int
    """The seed of the episode: the same in a run that is resumed."""


class SeatBindings:
    """The names of the models that play seats, by seat, for each assignment of the environments with such a function.

    Raises NotImportable for a function that does not load.
    """

    def __init__(self, environments: "Iterable[EnvironmentConfig]", step: int) -> None:
        self._sections = {each.name: each.bindings for each in environments if each.bindings}
        self._functions = {name: load_function(section.function) for name, section in self._sections.items()}
        self._step = step

    def of(self, assignment: Mapping[str, Any], task: Row) -> dict[str, str]:
        """Return the names of models by seat; none without a function.

        Raises UnknownPlayer for a name that no model has, and what the function raises.
        """
        name = assignment["environment"]
        if name not in self._functions:
            return {}
        # A stream samples for later steps, whose number begins the names of their groups.
        begin = re.match(r"\d+", assignment["group_id"])
        step = int(begin[0]) if begin else self._step
        episode = EpisodeInfo(name, assignment["example_id"], task, step, assignment["member"], assignment["seed"])
        section = self._sections[name]
        names = self._functions[name](episode, **section.arguments)
        if not isinstance(names, Mapping):
            raise UnknownPlayer(f"{section.function} returned {names!r}, and no mapping from seats to models")
        require_named("model", names.values(), (POLICY, *section.models))
        return dict(names)


def require_named(kind: str, names: Iterable[str], valid: Collection[str]) -> None:
    """Raise UnknownPlayer for a name of a model, or of a seat, that is none of the valid ones."""
    for name in names:
        if name not in valid:
            near = did_you_mean(str(name), valid)
            raise UnknownPlayer(f"there is no {kind} {name!r} here, but {', '.join(valid)}{near}")
