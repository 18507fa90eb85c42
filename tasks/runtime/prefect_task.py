"""A stage as a Prefect task: which failures are tried again, how long it may take, where it runs."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context, copy_context
from functools import cached_property
from typing import Any, cast

from storage.errors import StoreUnavailable
from tasks.runtime.stage import Ref, Stage

RETRIES = 2
RETRY_SECONDS = 15.0
"""Pause before a stage is called again that failed for a cause that may pass; one number, which Prefect can show."""
END_SECONDS = 5.0
"""Longest wait for the end of a step's task run."""
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


CACHED = "Cached"
"""The name of a task run's state whose work the ledger had."""
KEY_CHARACTERS = 8


def describe_ref(ref: Ref) -> str:
    """Return a stage's result in a line: rows, tokens, the beginning of its key, and another run that computed it."""
    parts = [f"{count:,} {table}" for table, count in ref.rows]
    parts += [f"{ref.tokens:,} tokens"] if ref.tokens else []
    parts += [f"key {ref.key[:KEY_CHARACTERS]}"]
    return ", ".join(parts if ref.computed else [*parts, f"computed by run {ref.run}"])


def tag_current(tags: Sequence[str]) -> None:
    """Give the task run around these tags, to be filtered by.

    Prefect asks its API for a limit on each tag that a task run begins with. These come later, with its next state.
    """
    from prefect.context import TaskRunContext

    context = TaskRunContext.get()
    if context is not None:
        context.task_run.tags = sorted({*context.task_run.tags, *tags})


def call_with_retries(work: Callable[[], Ref]) -> Ref:
    """Do a stage's work without a task run; again after the same pause where it failed for a cause that may pass."""
    for _ in range(RETRIES):
        try:
            return work()
        except TRANSIENT:
            time.sleep(RETRY_SECONDS)
    return work()


def report_cached(message: str, tags: Sequence[str]) -> None:
    """Make a task run that says what the ledger had; it never fails the flow around."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE
    from prefect.context import TagsContext
    from prefect.states import Completed

    def report() -> Any:
        tag_current(tags)
        return Completed(name=CACHED, message=message)

    made: Any = task(name="report", task_run_name="cached", cache_policy=NO_CACHE, persist_result=False)(report)
    with TagsContext(current_tags=set()):
        made()


class StepTask:
    """The task run of a whole step; task runs in its context are parts of it, from whichever thread they come.

    Its body only waits, in a thread of its own: the stages of a step come from the threads of batch and training.
    """

    def __init__(self, step: int, tags: Sequence[str]) -> None:
        """Begin it in the flow run around. Raises CancelledError where Prefect does not begin it."""
        self._begun, self._end = Future[Context](), Future[tuple[str, str]]()
        # A daemon: a run that is ended in the middle must not wait for a step that nobody ends.
        self._thread = threading.Thread(target=copy_context().run, args=(self._run, step, tags), daemon=True)
        self._thread.start()
        self._context = self._begun.result()

    def call(self, work: Callable[[], Ref]) -> Ref:
        """Do work as a part of the step."""
        return self._context.copy().run(work)  # a copy: two threads cannot be in one context

    def end(self, ending: str, message: str) -> None:
        """End it in the state that fits the ending of a step or a run: `finished`, `cancelled` or another."""
        self._end.set_result((ending, message))
        self._thread.join(END_SECONDS)  # its state is on its way before the flow run ends

    def _run(self, step: int, tags: Sequence[str]) -> None:
        from prefect import states, task
        from prefect.cache_policies import NO_CACHE
        from prefect.context import TagsContext

        @task(name="step", task_run_name=f"step-{step}", cache_policy=NO_CACHE, persist_result=False)
        def run() -> Any:
            tag_current(tags)
            self._begun.set_result(copy_context())
            ending, message = self._end.result()
            made = {"finished": states.Completed, "cancelled": states.Cancelled}.get(ending, states.Failed)
            return made(message=message)

        try:
            with TagsContext(current_tags=set()):
                run(return_state=True)
        finally:
            self._begun.cancel()  # where it never began, nobody waits for it for ever


class StageTask:
    """A stage as a Prefect task, made when it is first called so that stage files import without Prefect."""

    def __init__(self, stage: Stage[Any]) -> None:
        self.stage = stage

    @cached_property
    def task(self) -> Any:
        """The Prefect task: named after stage and step, no result cache and no result storage of Prefect's own."""
        from prefect import task
        from prefect.cache_policies import NO_CACHE
        from prefect.states import Completed, Failed

        @task(
            name=self.stage.name,
            description=self.stage.function.__doc__,
            task_run_name="{label}-{step}",
            # The ledger decides what is computed; a second memory would drift from it.
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=RETRIES,
            retry_delay_seconds=RETRY_SECONDS,
            retry_condition_fn=is_transient,
        )
        def run(step: int, label: str, work: Callable[[], Ref], tags: Sequence[str]) -> Any:
            tag_current(tags)
            try:
                ref = work()
            except Exception as error:  # the border at which Prefect gets the error; `__call__` raises it again
                return Failed(message=error_text(error), data=error)
            return Completed(name=None if ref.computed else CACHED, message=describe_ref(ref), data=ref)

        return run

    def __call__(self, step: int, work: Callable[[], Ref], label: str = "", tags: Sequence[str] = ()) -> Ref:
        """Do the stage's `work` at `step` as a task of the current flow; raises what it raises.

        `work` is a partial call of `perform`: Prefect walks every collection that it is given in search of futures, and
        a partial is none, but travels to the workers of a task runner. `label` is what the task run is called before
        its step, the stage's name by default; `tags` are for filters.
        """
        from prefect.context import TagsContext

        arguments = {"step": step, "label": label or self.stage.name, "work": work, "tags": tuple(tags)}
        # A task run would take over the flow run's tags and ask the API for a limit on each before it starts.
        with TagsContext(current_tags=set()):
            state = self._submit(arguments) if self._runs_on_workers() else self._local_task()(**arguments)
        done = state.result(raise_on_failure=False)  # `data` is Prefect's record of it
        if isinstance(done, BaseException):
            raise done
        return cast(Ref, done)

    @cached_property
    def _timed_task(self) -> Any:
        return self.task.with_options(timeout_seconds=TABLES_ONLY_SECONDS)

    def _local_task(self) -> Any:
        """Return the task; with a time limit where it only computes, in the one thread that Prefect can interrupt."""
        # Prefect ends a task by an alarm signal, which only the main thread receives.
        in_main = threading.current_thread() is threading.main_thread()
        return self._timed_task if in_main and not self.stage.may_block else self.task

    def _runs_on_workers(self) -> bool:
        """Tell whether the flow was given a task runner with workers and the stage waits for nobody."""
        from prefect.context import FlowRunContext
        from prefect.task_runners import ThreadPoolTaskRunner

        context = FlowRunContext.get()
        # Prefect's default is a pool of threads in this process, where nothing is won by submitting.
        runner = context.task_runner if context else None
        return runner is not None and not isinstance(runner, ThreadPoolTaskRunner) and not self.stage.may_block

    def _submit(self, arguments: Mapping[str, Any]) -> Any:
        """Hand the work to the task runner and wait for it; return the state that it ended in."""
        future = self.task.submit(**arguments)
        future.wait()
        return future.state


def as_task(stage: Stage[Any]) -> StageTask:
    """Return `stage` as a Prefect task."""
    return StageTask(stage)
