"""What a stage is, and the one adapter that runs it: key, ledger, inputs, compute, commit.

A stage is a pure function of tables with what it reads, writes and depends on declared beside it. It never mentions
run, path, Prefect or Delta Lake. `perform` gives it all of that, and `as_task` makes a Prefect task of it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from storage.refs import Entry
from tasks.attempt import Attempt, Tables
from tasks.place import Place, key_of
from tasks.retries import RETRY_SECONDS, TABLES_ONLY_SECONDS, WAITS_FOR, in_words, is_transient

__all__ = [
    "Place",
    "Policy",
    "Ref",
    "Stage",
    "StageTask",
    "Tables",
    "as_task",
    "inputs_of",
    "key_of",
    "perform",
    "ref_of",
]


@dataclass(frozen=True)
class Stage:
    """A pure function from named tables to named tables, and everything that its key is made of.

    `function` is called as `function(tables, config, **needs)`: `tables` holds exactly `reads`, and of `optional` what
    there is, `config` is a view of
    the declared `sections`, and each name in `needs` (for example `step`) is handed over as a keyword.
    """

    name: str
    """The stage's name; tables, ledger and task runs carry it."""
    version: int
    """Raised when the meaning of the stage's rows changes."""
    reads: tuple[str, ...]
    """Tables that go in."""
    writes: tuple[str, ...]
    """Tables that come out."""
    sections: tuple[str, ...]
    """Config sections that the function may read; they are in the key."""
    function: Callable[..., Tables]
    """The pure function."""
    optional: tuple[str, ...] = ()
    """Tables that go in where one of the inputs made them, or come out where the function made any."""
    unit: tuple[str, str] = ("", "")
    """Of a stage that commits in parts: the table and the column that name what comes as one."""
    needs: tuple[str, ...] = ()
    """Keywords that the function takes beside tables and config: step, key, policy, directory, parts, or a service."""


@dataclass(frozen=True)
class Ref:
    """What travels between tasks: the key of finished work and how many rows it made."""

    stage: str
    step: int
    key: str
    rows: tuple[tuple[str, int], ...]
    """Rows by table."""
    tokens: int
    seconds: float
    """Wall-clock that the work took when it was computed."""
    computed: bool
    """False when the ledger already had it."""

    def num_rows(self, table: str) -> int:
        """Return how many rows of `table` this work made."""
        return dict(self.rows)[table]


@dataclass(frozen=True)
class Policy:
    """A version of the weights, by the key of the work that made it."""

    key: str
    version: int


def inputs_of(refs: Sequence[Ref], policy: Policy | None = None) -> dict[str, str]:
    """Return the keys that go into a stage's key, by the name of what made them; the second of a stage is name.1."""
    keys: dict[str, str] = {}
    for ref in refs:
        number = sum(name.partition(".")[0] == ref.stage for name in keys)
        keys[f"{ref.stage}.{number}" if number else ref.stage] = ref.key
    return keys | ({"policy": policy.key} if policy else {})


def perform(
    stage: Stage,
    place: Place,
    step: int,
    refs: Sequence[Ref] = (),
    policy: Policy | None = None,
    services: Mapping[str, Any] | None = None,
    extra_inputs: Mapping[str, str] | None = None,
) -> Ref:
    """Run one stage, or find that it has run: the only way in which work is done.

    `extra_inputs` are digests of inputs that are no tables (a file, a batch attempt). Raises what the stage raises,
    with a note that says which run, step and stage it was and that nothing of the attempt is visible.
    """
    inputs = inputs_of(refs, policy) | dict(extra_inputs or {})
    key = place.key(stage, step, inputs)
    entry = place.find(key)
    if entry is not None:
        return ref_of(place.adopt(entry, step), computed=False)
    attempt = Attempt(stage, place, step, key, inputs, policy)
    try:
        return ref_of(attempt.finish(attempt.compute(refs, services or {})), computed=True)
    except Exception as error:
        error.add_note(
            f"Run {place.run}, step {step}, stage {stage.name}. Nothing of this attempt is visible; all earlier stages "
            f"are safe in the ledger. Call the same run again to go on from here."
        )
        raise
    finally:
        attempt.discard()


def ref_of(entry: Entry, computed: bool) -> Ref:
    """Return the reference to a finished piece of work."""
    rows: dict[str, int] = {}
    for piece in entry.outputs:
        rows[piece.table] = rows.get(piece.table, 0) + piece.rows
    seconds = (entry.finished_at - entry.started_at).total_seconds()
    return Ref(entry.stage, entry.step, entry.key, tuple(rows.items()), entry.tokens, seconds, computed)


class StageTask:
    """A stage as a Prefect task, made when it is first called so that stage files import without Prefect."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.waits = bool(WAITS_FOR & set(stage.needs))
        """Whether the stage may take any time, for a service or a person."""

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
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=len(RETRY_SECONDS),
            retry_delay_seconds=list(RETRY_SECONDS),
            retry_condition_fn=is_transient,
        )
        def run(place: Place, step: int, refs: Sequence[Ref], policy: Policy | None, bag: Any) -> Any:
            try:
                return perform(self.stage, place, step, refs, policy, bag.services, bag.extra_inputs)
            except Exception as error:  # the border at which Prefect is told; `__call__` raises it again
                return Failed(message=in_words(error), data=error)

        return run

    def __call__(
        self,
        place: Place,
        step: int,
        refs: Sequence[Ref] = (),
        policy: Policy | None = None,
        services: Mapping[str, Any] | None = None,
        extra_inputs: Mapping[str, str] | None = None,
    ) -> Ref:
        """Run the stage as a task of the current flow; arguments as in `perform`."""
        from prefect.client.schemas.objects import State
        from prefect.context import TagsContext

        # A task run would take over the flow run's tags and ask the API for a limit on each before it starts.
        needed = {name: value for name, value in (services or {}).items() if name in self.stage.needs}
        given = (place, step, tuple(refs), policy, _Bag(needed, extra_inputs or {}))
        with TagsContext(current_tags=set()):
            done = self._submitted(given) if self._goes_elsewhere() else self._timed()(*given)
        if isinstance(done, State):
            raise cast(BaseException, done.result(raise_on_failure=False))  # `data` is Prefect's record of it
        ref: Ref = done
        return ref

    @cached_property
    def _timed_task(self) -> Any:
        return self.task.with_options(timeout_seconds=TABLES_ONLY_SECONDS)

    def _timed(self) -> Any:
        """Return the task; with a time limit where it only computes, in the one thread that Prefect can interrupt."""
        in_main = threading.current_thread() is threading.main_thread()
        return self._timed_task if in_main and not self.waits else self.task

    def _goes_elsewhere(self) -> bool:
        """Tell whether the flow was given a task runner with workers and the stage needs nothing but tables."""
        from prefect.context import FlowRunContext
        from prefect.task_runners import ThreadPoolTaskRunner

        context = FlowRunContext.get()
        runner = context.task_runner if context else None
        return runner is not None and not isinstance(runner, ThreadPoolTaskRunner) and not self.waits

    def _submitted(self, given: tuple[Any, ...]) -> Any:
        """Hand the stage to the task runner and wait for it."""
        future = self.task.submit(*given)
        future.wait()
        state = future.state
        return future.result() if state.is_completed() else state


class _Bag:
    """Carries arguments past Prefect, which walks every collection it is given in search of futures."""

    def __init__(self, services: Mapping[str, Any], extra_inputs: Mapping[str, str]) -> None:
        self.services = services
        self.extra_inputs = extra_inputs


def as_task(stage: Stage) -> StageTask:
    """Return `stage` as a Prefect task."""
    return StageTask(stage)
