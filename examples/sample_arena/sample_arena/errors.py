"""What can be wrong with an arena or a move in it; each says what, where and what to do."""


class ArenaError(ValueError):
    """An arena that cannot be played as it was set up."""


class PlayError(Exception):
    """An episode that cannot go on: recorded as the failure of this episode, never of others."""


class ProtocolError(PlayError):
    """A move that the rules do not allow; the state is as it was before."""


class WrongMember(ProtocolError):
    """Someone spoke whose turn it was not."""


class SpokenAlready(ProtocolError):
    """A member spoke twice in one slot."""


class PlayFinished(ProtocolError):
    """Someone spoke after the end."""


class ScoreError(PlayError):
    """A score that does not fit the members of its episode: nothing of it is written."""


class MemberFailed(PlayError):
    """A member's model, tools or time gave out before it had spoken."""

    def __init__(self, member: str, reason: str) -> None:
        super().__init__(f"member {member!r} failed: {reason}")
        self.member = member


class PromptTooLong(PlayError):
    """What a member has to read no longer fits its model or its limits."""

    def __init__(self, member: str, reason: str) -> None:
        super().__init__(f"the prompt of member {member!r} is too long: {reason}")
        self.member = member
