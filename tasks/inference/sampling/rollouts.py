"""Samples a batch of assignments through environment servers and the engine; hands over each group when complete."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from tasks.inference.engine.client import ServedModel
from tasks.inference.sampling.attempts import RolloutRunner, Rows
from tasks.inference.sampling.limits import AdaptiveLimit, GroupQuota, Limiter, StoppedEarly, straggler_failure
from tasks.inference.sampling.lost_servers import InFlightRollout, ServiceLost, ServiceWatch, server_name
from tasks.inference.trace_rows.failures import Failure
from tasks.inference.trace_rows.image_tensors import tensors_of
from tasks.inference.trace_rows.rows import Row, trace_tables
from tasks.runtime.stage import Policy

if TYPE_CHECKING:
    from configs.run import View
    from tasks.inference.sampling.rollout_client import RolloutClient

OnGroup = Callable[[str, dict[str, pa.Table]], None]
POLL_SECONDS = 0.5
"""Upper bound on how late a signal is noticed that arrives just before the thread waits."""
LAG_INTERVAL_SECONDS = 0.25
"""Length of the sleeps that are measured."""
Result = TypeVar("Result")

_log = logging.getLogger("stagecoach")


@dataclass(frozen=True)
class SamplingPlan:
    """What differs between the samplers of one stage."""

    num_groups: Mapping[str, int] = field(default_factory=dict)
    """By environment: after how many groups the others are stopped. An environment without a number is sampled to the
    end."""
    one_at_a_time: bool = False
    """Whether at most one rollout is in flight."""
    given_up: Mapping[str, Failure] = field(default_factory=dict)
    """Assignments that are not sampled, by id, with the reason: each becomes a failed row at once."""
    outdated: Callable[[], bool] = lambda: False
    """Whether no further group may be begun; what is begun is sampled to its end, the others leave nothing."""


DEFAULT_PLAN = SamplingPlan()


class NotBegun(Exception):
    """A group was not begun, because the plan is outdated."""


class BatchSampler:
    """Makes one rollout for each assignment; calls `on_group(group_id, tables)` when a group's last member has ended.

    `served` are the models that sample, by environment: the policy under OF_POLICY, which samples every environment
    that is not named, and frozen seats under `seat_model_name`. `config` has the sections rollout, environments, engine
    and model. Every assignment ends as at least one traces row: a failed rollout is a row with its error. Groups are
    handed over one at a time, from a thread of their own.
    """

    def __init__(
        self,
        *,
        served: Mapping[str, ServedModel],
        addresses: Mapping[str, str],
        policy: Policy,
        step: int,
        config: "View",
        on_group: OnGroup,
        plan: SamplingPlan = DEFAULT_PLAN,
    ) -> None:
        self.on_group = on_group
        self.addresses = addresses
        engines = tuple(each for each in served.values() if not each.chat)
        self.watch = ServiceWatch(engines, addresses)
        self.clients: dict[str, RolloutClient] = {}
        self.runner = RolloutRunner(served, self.clients, self.watch, policy, step, config)
        self.config = config
        self.plan = plan
        self.quota = GroupQuota(plan.num_groups)
        self.in_flight: set[InFlightRollout] = set()
        self.begun: set[str] = set()
        self.limiter = Limiter(1 if plan.one_at_a_time else config.rollout.max_in_flight)
        adaptive = config.rollout.adaptive_in_flight and not plan.one_at_a_time
        self.adaptive_limit = AdaptiveLimit(self.limiter, engines) if adaptive else None
        self.loop_lag = LoopLag()
        # The store takes one commit after another; groups that end together must not race for it.
        self.commit_lock = asyncio.Lock()

    def sample(self, assignments: pa.Table, examples: pa.Table) -> None:
        """Sample every assignment and wait for it.

        Raises ServiceLost where the engine or an environment server is gone: groups handed over before are complete,
        the others left nothing.
        """
        run_in_background_loop(self._run(assignments, examples))

    async def _run(self, assignments: pa.Table, examples: pa.Table) -> None:
        from tasks.inference.sampling.rollout_client import RolloutClient

        rows = assignments.to_pylist()
        tasks = _tasks_by_example(examples, rows)
        self.clients.update(
            {name: RolloutClient(self.addresses[name]) for name in {row["environment"] for row in rows}}
        )
        watching = asyncio.create_task(self.watch.run())
        sampling = asyncio.create_task(self._sample_groups(rows, tasks))
        monitors = [asyncio.create_task(each.run()) for each in (self.loop_lag, self.adaptive_limit) if each]
        try:
            await asyncio.wait({watching, sampling}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # the watch ends only by raising ServiceLost
            await sampling
        except ServiceLost as lost:
            raise self._add_in_flight(lost) from lost.__cause__
        except ExceptionGroup as several:
            raise self._add_in_flight(_root_cause(several)) from several
        finally:
            for task in (watching, sampling, *monitors):
                task.cancel()
            ends = await asyncio.gather(watching, sampling, *monitors, return_exceptions=True)
            for end in ends[2:]:  # a monitor that fails stops no rollout
                if isinstance(end, Exception):
                    _log.error("the monitor of the limit or of the event loop's lag has failed: %r", end)
            for client in self.clients.values():
                client.close()
            _log.info("sampled %d rollouts; %s", len(rows), self.loop_lag)

    async def _sample_groups(self, rows: list[Row], tasks: Mapping[tuple[str, str], str]) -> None:
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(row["group_id"], []).append(row)
        async with asyncio.TaskGroup() as running:
            for group_id, members in groups.items():
                running.create_task(self._sample_or_leave(group_id, members, tasks))

    async def _sample_or_leave(self, group_id: str, members: list[Row], tasks: Mapping[tuple[str, str], str]) -> None:
        try:
            await self._sample_group(group_id, members, tasks)
        except* NotBegun:  # its other members wait for the limit, or have seen the same
            pass

    async def _sample_group(self, group_id: str, members: list[Row], tasks: Mapping[tuple[str, str], str]) -> None:
        texts = {tasks[row["environment"], row["example_id"]] for row in members}  # nearly always one
        parsed = {text: json.loads(text) for text in texts}
        async with asyncio.TaskGroup() as running:
            pending = [
                running.create_task(self._sample_assignment(row, parsed[tasks[row["environment"], row["example_id"]]]))
                for row in members
            ]
        results = [task.result() for task in pending]
        # A group with a stopped member does not count: the quota is of groups that ended by themselves.
        if not any(stopped for _, stopped in results):
            self.quota.count_group(members[0]["environment"])
        rows = [rows for rows, _ in results]
        tables = trace_tables((t for traces, _ in rows for t in traces), (m for _, messages in rows for m in messages))
        if "images" in tables:
            tables |= await asyncio.to_thread(tensors_of, tables["images"], self.config.model)
        async with self.commit_lock:
            # Committing takes long enough to delay every rollout in flight, were it done on the event loop.
            await asyncio.to_thread(self.on_group, group_id, tables)

    async def _sample_assignment(self, assignment: Row, task: dict[str, Any]) -> tuple[Rows, bool]:
        """Return the rows of one assignment, and whether it was stopped; waits until the limit admits it."""
        if (failure := self.plan.given_up.get(assignment["assignment_id"])) is not None:
            return self.runner.rows_without_trace(assignment, failure, time.time(), 0.0), False
        started: float | None = None
        rollout = InFlightRollout(assignment["assignment_id"], assignment["group_id"], assignment["environment"])
        try:
            async with self.quota.stop_when_reached(assignment["environment"]), self.limiter:
                self._begin(assignment["group_id"])
                started = time.time()
                self.in_flight.add(rollout)
                rows = await self.runner.run(assignment, task)
        except StoppedEarly:
            self.in_flight.discard(rollout)
            now = time.time()
            seconds = None if started is None else now - started
            failure = straggler_failure(assignment["environment"], seconds)
            return self.runner.rows_without_trace(assignment, failure, started or now, seconds or 0.0), True
        # Not in a `finally`: one that is cancelled by the loss of a server stays in flight, for `_add_in_flight`.
        self.in_flight.discard(rollout)
        return rows, False

    def _begin(self, group_id: str) -> None:
        """Begin a group with the first of its members that the limit admits; raises NotBegun where it is too late."""
        if group_id not in self.begun and self.plan.outdated():
            raise NotBegun
        self.begun.add(group_id)

    def _add_in_flight(self, error: Exception) -> Exception:
        """Add to the loss of an environment server the rollouts that were in flight there."""
        if isinstance(error, ServiceLost):
            error.in_flight = [each for each in self.in_flight if server_name(each.environment) == error.service]
        return error


def _root_cause(several: ExceptionGroup) -> Exception:
    """Return the error that stopped everything: many rollouts may notice the same loss of a service at once."""
    errors = list[Exception]()
    for error in several.exceptions:
        errors.append(_root_cause(error) if isinstance(error, ExceptionGroup) else error)
    return next((error for error in errors if isinstance(error, ServiceLost)), errors[0])


def _tasks_by_example(examples: pa.Table, assignments: Iterable[Row]) -> dict[tuple[str, str], str]:
    """Return the tasks of all assigned examples as JSON, by environment and example id.

    Raises ValueError where an example is not in the table.
    """
    wanted = {(row["environment"], row["example_id"]) for row in assignments}
    columns = (examples[name].to_pylist() for name in ("environment", "example_id", "task"))
    tasks = {(name, example): task for name, example, task in zip(*columns, strict=True) if (name, example) in wanted}
    if missing := wanted - tasks.keys():
        name, example = min(missing)
        raise ValueError(f"{len(missing)} assigned examples are not in the examples table, first {name!r} {example!r}")
    return tasks


def run_in_background_loop(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine as `asyncio.run` does, in a thread; return what it returns, raise what it raises.

    An exception that a signal raises in the waiting thread cancels the coroutine, and is passed on once that has ended.
    """
    # Such an exception (KeyboardInterrupt, the cancellation of a flow) is raised in the main thread, between any two
    # instructions. Were the loop there, it could strike inside a callback and tear the loop's state apart; here it
    # strikes the waiting thread alone.
    loop = asyncio.new_event_loop()  # made here, so that this thread can cancel through it at any time
    started: list[asyncio.Task[Result]] = []
    cancelled, ended = threading.Event(), threading.Event()

    async def start_work() -> None:
        task = asyncio.create_task(coroutine)
        started.append(task)
        if cancelled.is_set():  # by a signal that came before there was a task to cancel
            task.cancel()
        await asyncio.wait([task])

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(start_work())
        finally:
            ended.set()

    thread = threading.Thread(target=copy_context().run, args=(run,), name="event loop")
    try:
        thread.start()
        # Not `thread.join()`: a wait without a time limit may not notice a signal that arrives just before it.
        while not ended.wait(POLL_SECONDS):
            continue
    finally:
        cancelled.set()
        with suppress(RuntimeError):  # the loop is closed: the coroutine has ended by itself
            for task in started:
                loop.call_soon_threadsafe(task.cancel)
        while thread.is_alive() and not ended.wait(POLL_SECONDS):
            continue
    thread.join()
    return started[0].result()


class LoopLag:
    """Measures how much later than requested a sleep on the running event loop ends, in seconds.

    Everything on the loop waits about that long: an answer of the engine that has arrived, a time limit that is over.
    """

    def __init__(
        self, clock: Callable[[], float] | None = None, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self.worst = 0.0
        self.total = 0.0
        self.num_samples = 0

    async def run(self) -> None:
        """Measure until cancelled."""
        clock = self._clock or asyncio.get_running_loop().time
        while True:
            before = clock()
            await self._sleep(LAG_INTERVAL_SECONDS)
            self.add(clock() - before - LAG_INTERVAL_SECONDS)

    def add(self, late: float) -> None:
        """Count one measurement; a clock of low resolution may give a negative one, which counts as 0."""
        late = max(0.0, late)
        self.num_samples += 1
        self.total += late
        self.worst = max(self.worst, late)

    def __str__(self) -> str:
        if not self.num_samples:
            return "the event loop's lag was not measured"
        average = self.total / self.num_samples
        return f"the event loop was {average:.3f} s late on average and {self.worst:.3f} s at worst"
