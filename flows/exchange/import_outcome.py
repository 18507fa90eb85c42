"""What an import brought in, as values and as lines for a person."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """What an import brought in."""

    run: str
    store: str
    num_computed: int
    """Pieces of work that were not there before."""
    num_steps: int
    figures: dict[str, int] = field(default_factory=dict)
    """Rollouts by where their tokens come from, and what else is worth knowing; of what was computed."""
    groups: dict[str, int] = field(default_factory=dict)
    """How many groups there are, and of how many a baseline can be made; of what was computed."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Lines left out, by reason."""


def said(outcome: Outcome) -> list[str]:
    """Return the lines that tell what came in, what was left out, and how to train on it."""
    steps = "1 step" if outcome.num_steps == 1 else f"{outcome.num_steps} steps"
    figures = ", ".join(f"{number} {name}" for name, number in outcome.figures.items())
    found = figures if outcome.num_computed else "these files were imported before, nothing was computed"
    text = outcome.figures.keys() & {"with rendered tokens", "with given tokens"}
    supervised = " algorithm.type=supervised" if text else ""
    again = f"stagecoach replay {outcome.run} --from filtering --set model.path=DIR{supervised}"
    return [
        f"run {outcome.run}: {steps}; {found}",
        *_of_groups(outcome.groups),
        *(f"left out: {number} x {reason}" for reason, number in outcome.left_out.items()),
        f"train on it with: {again} --store {outcome.store}",
    ]


def _of_groups(groups: Mapping[str, int]) -> list[str]:
    """Return what to say of the groups, with a warning where no baseline could tell their members apart."""
    if not groups:
        return []
    total, several, differ = groups.values()
    noun = "group" if total == 1 else "groups"
    lines = [f"{total} {noun}: {several} of more than one rollout, {differ} with differing rewards"]
    if not differ:
        lines.append("No group has differing rewards: a baseline of the group (grpo, rloo) leaves nothing to train on.")
    return lines
