"""The colours of stages, the same wherever stages are drawn; rollouts by whatever stage have one."""

from flows.viewer.drawing.svg import colour

_NUMBERS = {
    "rollout": 0,
    "demonstration": 0,
    "import": 0,
    "training": 1,
    "evaluation": 2,
    "filtering": 3,
    "advantage": 4,
    "packing": 5,
    "regrade": 5,
    "reference": 6,
    "gate": 6,
}
_OTHER = 7


def stage_number(stage: str) -> int:
    """Return the number of a stage's colour."""
    return _NUMBERS.get(stage, _OTHER)


def stage_class(stage: str) -> str:
    """Return the class of a stage's colour."""
    return colour(stage_number(stage))
