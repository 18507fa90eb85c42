"""What can be wrong with an arena or a move in it; each says what, where and what to do."""

from verifiers.v1.errors import RolloutError


class ArenaError(ValueError):
    """An arena that cannot be played as it was set up: found before anything is played."""


class ProtocolError(RolloutError):
    """A move that the rules do not allow: the wrong member, one that has moved already, or one after the end."""


class ScoreError(RolloutError):
    """A score that does not fit the members of its episode: nothing of it is written."""
