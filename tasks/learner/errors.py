"""What can go wrong between the pipeline and the learner, in three classes."""


class LearnerError(ValueError):
    """The learner refused or failed a request and says why; it still answers."""


class NoOptimizerState(LearnerError):
    """The policy's directory has no optimizer state and a fresh optimizer was not asked for."""


class LearnerLost(ConnectionError):
    """The learner's process is gone, or was never there; what it held in memory is gone with it."""


BY_NAME: dict[str, type[LearnerError]] = {error.__name__: error for error in (LearnerError, NoOptimizerState)}
