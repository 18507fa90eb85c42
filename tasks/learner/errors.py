"""Errors between the pipeline and the learner; imports no torch."""


class LearnerError(ValueError):
    """The learner refused or failed a request, with the reason; it still answers."""


class NoOptimizerState(LearnerError):
    """The policy's directory has no optimizer state and a fresh optimizer was not asked for."""


class LearnerLost(ConnectionError):
    """The learner's process is gone, or was never there; the policy in its memory is lost."""


BY_NAME: dict[str, type[LearnerError]] = {error.__name__: error for error in (LearnerError, NoOptimizerState)}
"""The errors that travel from the learner to its client, by the name that is sent."""
