"""BatchSampler: samples assignments through environment servers and the engine, and hands over each finished group.

The stages rollout and evaluation make one for a batch, the queue's thread one for each policy; `sample` runs its event
loop in a thread and waits. It owns which groups are in flight. Beside it, in that loop: ServerPool (servers and
replicas), ServiceWatch (lost ones, silent engines), RolloutRunner (one rollout, with retries), GroupQuota (when
rollouts stop) and LoadMeter (rollouts under way).
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from storage.turns import TurnCache
from tasks.arrays.columns import rows_with
from tasks.inference.engine.client import MODEL, OF_POLICY, SERVE_SECONDS, EngineLost, ServedModel
from tasks.inference.sampling.crash_isolation import CrashIsolation, InFlightRollout
from tasks.inference.sampling.episode_rows import Rows
from tasks.inference.sampling.limits import GroupQuota, SamplingPlan, StoppedEarly, WeightUpdate, straggler_failure
from tasks.inference.sampling.lost_servers import ServiceLost, ServiceWatch
from tasks.inference.sampling.rollout_runner import RolloutRunner
from tasks.inference.sampling.server_pool import CrashesServers, FindServers, ReplicaLoad, ServerPool
from tasks.inference.trace_rows.image_tensors import tensors_of
from tasks.inference.trace_rows.rows import Row, trace_tables
from tasks.runtime.refs import Policy

if TYPE_CHECKING:
    from configs.run import View

Tables = dict[str, pa.Table]
OnGroup = Callable[[str, Tables], None]
POLL_SECONDS = 0.5
"""Upper bound on how late a signal is noticed that arrives just before the thread waits."""
Result = TypeVar("Result")
POLICY_SECONDS = 0.05
"""Between two looks for a newer policy, where that changes groups in flight."""

_log = logging.getLogger("stagecoach")


class NotBegun(Exception):
    """A group was not begun, because the plan is outdated."""


class BatchSampler:
    """Makes one rollout for each assignment; calls `on_group(group_id, tables)` when a group's last member has ended.

    `served` are the models that sample, by environment: the policy under OF_POLICY, which samples every environment
    that is not named, and frozen seats under `seat_model_name`. `config` has the sections rollout, environments, engine
    and model. Every assignment ends as at least one traces row: a failed rollout is a row with its error. Groups are
    handed over one at a time, from a separate thread. `addresses` are those of each environment's servers;
    `score_group` returns a group's tables with the rewards that the group as a whole is given.
    `find` give servers and engines that are new or started again, `load` what an engine says of its load. `turns` takes
    and has the turns that are not sampled again. With `records_experts` tables have the experts that the engine chose.
    """

    def __init__(
        self,
        *,
        served: Mapping[str, ServedModel],
        addresses: Mapping[str, Sequence[str]],
        policy: Policy,
        step: int,
        config: "View",
        on_group: OnGroup,
        plan: SamplingPlan | None = None,
        isolation: CrashIsolation | None = None,
        turns: TurnCache | None = None,
        find: Sequence[FindServers] = (),
        load: ReplicaLoad | None = None,
        score_group: Callable[[Tables], Tables] | None = None,
        records_experts: bool = False,
    ) -> None:
        self.records_experts = records_experts
        self.score_group, self.scoring = score_group, ThreadPoolExecutor(1)
        self.on_group, self.find, self.config = on_group, find, config
        self.plan = plan = plan or SamplingPlan()
        engines = {name: model for name, model in served.items() if not model.chat}
        of_policy = engines.get(OF_POLICY)
        urls = of_policy.urls if of_policy else ()
        # Weights that are exchanged under rollouts are so at all replicas that began them.
        spares_replicas = plan.weight_update != "keep"
        least = config.engine.bounds[0]
        self.servers = ServerPool(addresses, isolation or CrashIsolation(), urls, spares_replicas, least, load)
        silent_seconds = max(config.engine.hang_seconds, SERVE_SECONDS)
        self.watch = ServiceWatch(engines.values(), self.servers.addresses, self.servers.reassign, silent_seconds)
        # An adapter has its own name at the engine, so no rollout continues with another policy.
        is_adapter = of_policy is not None and of_policy.model != MODEL
        is_mixed = plan.weight_update == "keep" or (plan.versions is not None and not is_adapter)
        versions = (plan.versions or {}) if is_mixed else None
        self.runner = RolloutRunner(served, self.servers, self.watch, policy, step, config, versions, turns)
        self.quota = GroupQuota(plan.num_groups)
        self.begun: set[str] = set()
        self.live: dict[str, asyncio.Task[None]] = {}
        """Groups that are being sampled, or wait for the limit."""
        self.limiter = asyncio.Semaphore(config.rollout.max_in_flight)
        # The store takes one commit after another; groups that end together must not race for it.
        self.commit_lock = asyncio.Lock()

    def sample(self, assignments: pa.Table, examples: pa.Table) -> None:
        """Sample every assignment and wait for it.

        Raises ServiceLost where the engine or an environment server is gone: groups handed over before are complete,
        the others left nothing.
        """
        run_in_background_loop(self._run(assignments, examples))

    async def _run(self, assignments: pa.Table, examples: pa.Table) -> None:
        watching = asyncio.create_task(self._watch_services())
        sampling = asyncio.create_task(self._sample_groups(assignments, examples))
        try:
            await asyncio.wait({watching, sampling}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # the watch ends only by raising
            await sampling
        except ExceptionGroup as several:
            raise _root_cause(several) from several
        finally:
            for task in (watching, sampling):
                task.cancel()
            await asyncio.gather(watching, sampling, return_exceptions=True)
            await self.servers.close()
            lag = self.watch.clock.worst_lag
            _log.info("sampled %d groups; the event loop was %.3f s late at worst", len(self.begun), lag)

    async def _watch_services(self) -> None:
        async with asyncio.TaskGroup() as watching:
            watching.create_task(self.watch.run())
            watching.create_task(self.watch.follow_engines())
            watching.create_task(self.watch.clock.run())
            for find in self.find:
                watching.create_task(self.servers.follow(find, self.watch))

    async def _sample_groups(self, assignments: pa.Table, examples: pa.Table) -> None:
        async with asyncio.TaskGroup() as running:
            self._add_groups(running, assignments, examples)
            await self._follow_plan(running, examples)

    def _add_groups(self, running: asyncio.TaskGroup, assignments: pa.Table, examples: pa.Table) -> None:
        rows = assignments.to_pylist()
        tasks = _tasks_by_example(examples, rows)
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(row["group_id"], []).append(row)
        for group_id, members in groups.items():
            if group_id not in self.live.keys() | self.begun:
                self.live[group_id] = running.create_task(self._sample_or_leave(group_id, members, tasks))

    async def _follow_plan(self, running: asyncio.TaskGroup, examples: pa.Table) -> None:
        """Stop dropped groups, and continue with newer policies, as long as groups are sampled."""
        while self.live and self.plan.weight_update:
            await asyncio.sleep(POLICY_SECONDS)
            is_outdated = self.plan.is_outdated()
            is_aborted = is_outdated and self.plan.weight_update == "abort"
            for group_id in [*self.live] if is_aborted else self.plan.find_dropped([*self.live]):
                if not self.live[group_id].cancelling():  # a second one would strike what the first one waits for
                    self.live[group_id].cancel()
            if is_aborted:
                return
            if is_outdated and self.plan.weight_update == "keep":
                # Nothing is committed until the engine is known to serve the right weights.
                async with self.commit_lock:
                    self.runner.begin_exchange()
                    update = await asyncio.to_thread(self._update_weights)
                    self.runner.end_exchange()
                if update:
                    self.runner.update_weights(update.policy, update.served)
                    self._add_groups(running, update.assignments, examples)

    def _update_weights(self) -> WeightUpdate | None:
        try:
            return self.plan.update_weights()
        except EngineLost as error:
            raise ServiceLost(self.runner.served[OF_POLICY].url, str(error)) from error

    async def _sample_or_leave(self, group_id: str, members: list[Row], tasks: Mapping[tuple[str, str], str]) -> None:
        try:
            await self._sample_group(group_id, members, tasks)
        except* NotBegun:  # its other members wait for the limit, or have seen the same
            pass
        finally:
            del self.live[group_id]
            self.servers.finish(group_id)

    async def _sample_group(self, group_id: str, members: list[Row], tasks: Mapping[tuple[str, str], str]) -> None:
        async with asyncio.TaskGroup() as running:
            pending = [
                running.create_task(
                    self._sample_assignment(row, json.loads(tasks[row["environment"], row["example_id"]]))
                )
                for row in members
            ]
        results = [task.result() for task in pending]
        # A group with a stopped member does not count: the quota is of groups that ended by themselves.
        if not any(stopped for _, stopped in results):
            self.quota.count_group(members[0]["environment"])
        traces, messages = (
            list(chain.from_iterable(rows)) for rows in zip(*(rows for rows, _ in results), strict=True)
        )
        tables = trace_tables(traces, messages, self.records_experts)
        if "images" in tables:
            tables |= await asyncio.to_thread(tensors_of, tables["images"], self.config.model)
        if self.score_group:  # not in the loop's own threads: a run that is stopped waits for those
            loop, run = asyncio.get_running_loop(), copy_context().run
            tables = await loop.run_in_executor(self.scoring, run, self.score_group, tables)
        async with self.commit_lock:
            if self.runner.unproven is not None:  # the exchange failed, and all rollouts are being stopped
                return
            # Committing takes long enough to delay every rollout in flight, were it done on the event loop.
            await asyncio.to_thread(self.on_group, group_id, tables)

    async def _sample_assignment(self, assignment: Row, task: dict[str, Any]) -> tuple[Rows, bool]:
        """Return the rows of one assignment, and whether it was stopped; waits until the limit admits it."""
        started: float | None = None

        async def play(placed: InFlightRollout) -> Rows:
            nonlocal started
            self._begin(assignment["group_id"])
            started = started or time.time()
            with self.plan.meter.rollout() if self.plan.meter else nullcontext():
                return await self.runner.run(assignment, task, placed)

        try:
            async with self.quota.stop_when_reached(assignment["environment"]):
                return await self.servers.run(assignment, self.limiter, play), False
        except StoppedEarly:
            now = time.time()
            seconds = None if started is None else now - started
            failure = straggler_failure(assignment["environment"], seconds)
            return self.runner.rows_without_trace(assignment, failure, started or now, seconds or 0.0), True
        except CrashesServers as crash:
            return self.runner.rows_without_trace(assignment, crash.failure, time.time(), 0.0), False

    def _begin(self, group_id: str) -> None:
        """Begin a group with the first of its members that the limit admits; raises NotBegun where it is too late."""
        if group_id not in self.begun:
            if self.plan.is_outdated():
                raise NotBegun
            self.runner.oldest[group_id] = self.plan.begin(group_id, self.runner.versions_of_turns(group_id))
            self.begun.add(group_id)


def _root_cause(several: ExceptionGroup) -> Exception:
    """Return the error that stopped everything: many rollouts may notice the same loss of a service together."""
    cause: Exception = several.subgroup(ServiceLost) or several
    while isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[0]
    return cause


def _tasks_by_example(examples: pa.Table, assignments: Iterable[Row]) -> dict[tuple[str, str], str]:
    """Return the tasks of all assigned examples as JSON, by environment and example id."""
    rows = rows_with(examples, "example_id", list({row["example_id"] for row in assignments}))
    columns = rows.select(["environment", "example_id", "task"])
    return {(row["environment"], row["example_id"]): row["task"] for row in columns.to_pylist()}


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
