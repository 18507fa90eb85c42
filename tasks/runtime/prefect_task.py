"""A stage as a Prefect task: which failures are tried again, how long it may take, where it runs."""

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

from storage.errors import StoreUnavailable
from tasks.runtime.stage import Ref, Stage

RETRY_SECONDS = (5.0, 30.0)
"""Pauses before Prefect calls a stage again that failed for a cause that may pass."""
TABLES_ONLY_SECONDS = 6 * 3600.0
"""Longest time for a stage that waits for nobody. Those that do have time limits of their own in the config."""
TRANSIENT = (ConnectionError, TimeoutError, StoreUnavailable)
"""What may pass by itself: a lost engine, learner or environment server, a store that does not answer."""


def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Tell Prefect whether calling a failed stage again can help: not after an error that its user has to correct."""
    cause = state.data
    while hasattr(cause, "data"):  # the state that the stage ended in, within Prefect's own
        cause = cause.data
    return isinstance(cause, TRANSIENT)


def error_text(error: BaseException) -> str:
    """Return an error with its notes, which say what is safe and what to do: Prefect would show its text alone."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


class StageTask:
    """A stage as a Prefect task, made when it is first called so that stage files import without Prefect."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    @cached_property
    def task(self) -> Any:
        """The Prefect task: named after stage and step, no result cache and no result storage of Prefect's own."""
        from prefect import task
        from prefect.cache_policies import NO_CACHE
        from prefect.states import Failed

        @task(
            name=self.stage.name,
            description=self.stage.function.__doc__,
            task_run_name=f"{self.stage.name}-{{step}}",
            # The ledger decides what is computed; a second memory would drift from it.
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=len(RETRY_SECONDS),
            retry_delay_seconds=list(RETRY_SECONDS),
            retry_condition_fn=is_transient,
        )
        def run(step: int, work: Callable[[], Ref]) -> Any:
            try:
                return work()
            except Exception as error:  # the border at which Prefect is told; `__call__` raises it again
                return Failed(message=error_text(error), data=error)

        return run

    def __call__(self, step: int, work: Callable[[], Ref]) -> Ref:
        """Do the stage's `work` at `step` as a task of the current flow; raises what it raises.

        `work` is a partial call of `perform`: Prefect walks every collection that it is given in search of futures, and
        a partial is none, but travels to the workers of a task runner.
        """
        from prefect.client.schemas.objects import State
        from prefect.context import TagsContext

        # A task run would take over the flow run's tags and ask the API for a limit on each before it starts.
        with TagsContext(current_tags=set()):
            done = self._submit(step, work) if self._runs_on_workers() else self._local_task()(step, work)
        if isinstance(done, State):
            raise cast(BaseException, done.result(raise_on_failure=False))  # `data` is Prefect's record of it
        ref: Ref = done
        return ref

    @cached_property
    def _timed_task(self) -> Any:
        return self.task.with_options(timeout_seconds=TABLES_ONLY_SECONDS)

    def _local_task(self) -> Any:
        """Return the task; with a time limit where it only computes, in the one thread that Prefect can interrupt."""
        # Prefect ends a task by an alarm signal, which only the main thread receives.
        in_main = threading.current_thread() is threading.main_thread()
        return self._timed_task if in_main and not self.stage.waits else self.task

    def _runs_on_workers(self) -> bool:
        """Tell whether the flow was given a task runner with workers and the stage waits for nobody."""
        from prefect.context import FlowRunContext
        from prefect.task_runners import ThreadPoolTaskRunner

        context = FlowRunContext.get()
        # Prefect's default is a pool of threads in this process, where nothing is won by submitting.
        runner = context.task_runner if context else None
        return runner is not None and not isinstance(runner, ThreadPoolTaskRunner) and not self.stage.waits

    def _submit(self, step: int, work: Callable[[], Ref]) -> Any:
        """Hand the work to the task runner and wait for it."""
        future = self.task.submit(step, work)
        future.wait()
        state = future.state
        return future.result() if state.is_completed() else state


def as_task(stage: Stage) -> StageTask:
    """Return `stage` as a Prefect task."""
    return StageTask(stage)
