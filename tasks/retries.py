"""Which failures of a stage may pass by themselves, how long a stage may take, and an error in words."""

from typing import Any

from storage.errors import StoreUnavailable

RETRY_SECONDS = (5.0, 30.0)
"""Pauses before Prefect calls a stage again that failed for a cause that may pass."""
TABLES_ONLY_SECONDS = 6 * 3600.0
"""Longest time for a stage that waits for nobody. Those that do have time limits of their own in the config."""
WAITS_FOR = frozenset({"engine", "teachers", "environments", "learner", "graders", "approve"})
"""Needs that may take any time: services, and a person."""
TRANSIENT = (ConnectionError, TimeoutError, StoreUnavailable)
"""What may pass by itself: a lost engine, learner or environment server, a store that does not answer."""


def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Tell Prefect whether calling a failed stage again can help; an error that its user has to mend says no."""
    cause = state.data
    while hasattr(cause, "data"):  # the state that the stage ended in, within Prefect's own
        cause = cause.data
    return isinstance(cause, TRANSIENT)


def in_words(error: BaseException) -> str:
    """Return an error with its notes, which say what is safe and what to do: Prefect would show its text alone."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
