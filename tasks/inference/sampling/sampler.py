"""Samples a batch of assignments through environment servers and the engine; hands over each group when complete."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from storage.turns import TurnCache
from tasks.inference.engine.client import MODEL, SERVE_SECONDS, EngineLost, ServedModel
from tasks.inference.sampling.crash_isolation import CrashIsolation
from tasks.inference.sampling.limits import AdaptiveLimit, GroupQuota, Limiter, StoppedEarly, straggler_failure
from tasks.inference.sampling.load_meter import LoadMeter, report_loads
from tasks.inference.sampling.lost_servers import ServiceLost, ServiceWatch
from tasks.inference.sampling.replicas import Replicas
from tasks.inference.sampling.rollout_runner import OF_POLICY, RolloutRunner, Rows
from tasks.inference.sampling.server_pool import FindServers, GroupIsolated, ServerPool
from tasks.inference.trace_rows.image_tensors import tensors_of
from tasks.inference.trace_rows.rows import Row, trace_tables
from tasks.runtime.refs import Policy

if TYPE_CHECKING:
    from configs.run import View

OnGroup = Callable[[str, dict[str, pa.Table]], None]
POLL_SECONDS = 0.5
"""Upper bound on how late a signal is noticed that arrives just before the thread waits."""
POLICY_SECONDS = 0.05
"""Between two looks whether a newer policy is there, where that changes what is under way."""
Result = TypeVar("Result")

_log = logging.getLogger("stagecoach")


class Renewal(NamedTuple):
    """A newer policy that is served, with the assignments that may be begun with it."""

    policy: Policy
    served: ServedModel
    assignments: pa.Table


@dataclass(frozen=True)
class SamplingPlan:
    """What differs between the samplers of one stage."""

    num_groups: Mapping[str, int] = field(default_factory=dict)
    """By environment: after how many groups the others are stopped. An environment without a number is sampled to the
    end."""
    isolation: CrashIsolation = field(default_factory=CrashIsolation)
    """Which groups are sampled after all others, and which assignments become failed rows at once."""
    outdated: Callable[[], bool] = lambda: False
    """Whether no further group may be begun; what is begun is sampled to its end, the others leave nothing."""
    begin: Callable[[str, Collection[int]], int | None] = lambda group_id, versions: None
    """Is called with each group that is begun, and the versions of the policies that have sampled turns of it before.
    Returns the oldest version of which these may be used; None where only those of the policy itself may be."""
    turns: TurnCache | None = None
    """Takes the turns of rollouts that are under way, and has those that need not be sampled again."""
    renew: Callable[[], Renewal | None] | None = None
    """Called when the plan is outdated, to go on with a newer policy: what is begun then has tokens of both. It may
    return None, as often as it is called: then no further group is begun."""
    drops_begun: bool = False
    """Whether an outdated plan stops what is begun too: it leaves nothing."""
    expired: Callable[[Collection[str]], Collection[str]] = lambda groups: ()
    """Returns those of some groups that are not wanted any more: they are stopped and leave nothing."""
    versions: dict[str, int] = field(default_factory=dict)
    """Where rollouts may have tokens of several policies: the versions of these by key, to which a newer one is added
    before it is served. Without it a rollout that ends while the new weights are checked would name an unknown one."""
    streams: bool = False
    """Whether newer policies come, and groups may expire, while this is sampled."""
    meter: LoadMeter | None = None
    """Measures how many rollouts are under way, and what the engine says of itself."""


DEFAULT_PLAN = SamplingPlan()


class NotBegun(Exception):
    """A group was not begun, because the plan is outdated."""


class DroppedGroups(Exception):
    """What was begun is stopped, because the plan is outdated."""


class PreparedGroups(NamedTuple):
    """Assignments with the tasks of their examples as JSON, by environment and example id."""

    rows: list[Row]
    tasks: Mapping[tuple[str, str], str]


class BatchSampler:
    """Makes one rollout for each assignment; calls `on_group(group_id, tables)` when a group's last member has ended.

    `served` are the models that sample, by environment: the policy under OF_POLICY, which samples every environment
    that is not named, and frozen seats under `seat_model_name`. `config` has the sections rollout, environments, engine
    and model. Every assignment ends as at least one traces row: a failed rollout is a row with its error. Groups are
    handed over one at a time, from a thread of their own. `addresses` are those of each environment's servers. `bring`
    returns where the policy is served by now, and `find` where environment servers are (see `ServerPool.follow`),
    for those that are started again meanwhile.
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
        plan: SamplingPlan = DEFAULT_PLAN,
        bring: Callable[[], ServedModel] | None = None,
        find: FindServers | None = None,
    ) -> None:
        self.on_group = on_group
        self.find = find
        engines = tuple(each for each in served.values() if not each.chat)
        self.frozen = tuple(each for name, each in served.items() if name != OF_POLICY and not each.chat)
        urls = served[OF_POLICY].urls if OF_POLICY in served and not served[OF_POLICY].chat else ()
        # Weights that are exchanged under rollouts are so at all replicas that began them: none joins meanwhile.
        num_replicas = max(config.engine.num_replicas, len(urls))
        self.replicas = Replicas(urls, num_replicas, bring if num_replicas > 1 and not plan.renew else None)
        self.servers = ServerPool(addresses, self._record_loss, plan.isolation.isolates)
        silent_seconds = max(config.engine.hang_seconds, SERVE_SECONDS)
        self.watch = ServiceWatch(engines, self.servers.addresses, self._survive, silent_seconds)
        # It has a name of its own at the engine, so no rollout goes on with another one.
        adapter = OF_POLICY in served and served[OF_POLICY].model != MODEL
        self.runner = RolloutRunner(
            served,
            self.watch,
            policy,
            step,
            config,
            versions=plan.versions if plan.renew or (plan.versions and not adapter) else None,
            replica_of=self.replicas.url_of if urls else None,
            turns=plan.turns,
        )
        self.config = config
        self.plan = plan
        self.quota = GroupQuota(plan.num_groups)
        self.begun: set[str] = set()
        self.live: dict[str, asyncio.Task[None]] = {}
        """Groups that are being sampled, or wait for the limit, with their work."""
        self.stopped: set[str] = set()
        """Those that were not wanted any more."""
        self.limiter = Limiter(config.rollout.max_in_flight)
        self.adaptive_limit = AdaptiveLimit(self.limiter, engines) if config.rollout.adaptive_in_flight else None
        self.waiting: dict[str, tuple[list[Row], Mapping[tuple[str, str], str]]] = {}
        """Isolated groups with their tasks, which begin when all others have ended."""
        self.is_isolating = False
        # The store takes one commit after another; groups that end together must not race for it.
        self.commit_lock = asyncio.Lock()

    def sample(self, assignments: pa.Table, examples: pa.Table) -> None:
        """Sample every assignment and wait for it.

        Raises ServiceLost where the engine or an environment server is gone: groups handed over before are complete,
        the others left nothing.
        """
        run_in_background_loop(self._run(assignments, examples))

    async def _run(self, assignments: pa.Table, examples: pa.Table) -> None:
        def prepare(assigned: pa.Table) -> PreparedGroups:
            rows = assigned.to_pylist()
            return PreparedGroups(rows, _tasks_by_example(examples, rows))

        watching = asyncio.create_task(self._watch_services())
        sampling = asyncio.create_task(self._sample_groups(prepare(assignments), prepare))
        monitors = [asyncio.create_task(each.run()) for each in (self.adaptive_limit,) if each]
        monitors.append(asyncio.create_task(self.replicas.follow(self._join)))
        if self.plan.meter and self.replicas.urls:
            monitors.append(asyncio.create_task(report_loads(self.plan.meter, self._policy_served)))
        try:
            await asyncio.wait({watching, sampling}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # the watch ends only by raising
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
                    _log.error("the monitor of the limit or the replicas has failed: %r", end)
            await self.servers.close()
            lag = self.watch.clock.worst_lag
            _log.info("sampled %d groups; the event loop was %.3f s late at worst", len(self.begun), lag)

    async def _watch_services(self) -> None:
        async with asyncio.TaskGroup() as watching:
            watching.create_task(self.watch.run())
            watching.create_task(self.watch.follow_engines())
            watching.create_task(self.watch.clock.run())
            if self.find:
                watching.create_task(self.servers.follow(self.find, self.watch.lose))

    async def _sample_groups(self, prepared: PreparedGroups, prepare: Callable[[pa.Table], PreparedGroups]) -> None:
        try:
            async with asyncio.TaskGroup() as running:
                self._add_groups(running, prepared)
                if self.plan.streams:
                    running.create_task(self._follow_stream(running, prepare))
            self.is_isolating = True
            while self.waiting:
                group_id, members = self.waiting.popitem()
                async with asyncio.TaskGroup() as running:
                    self.live[group_id] = running.create_task(self._sample_or_leave(group_id, *members))
                    if self.plan.streams:
                        running.create_task(self._follow_stream(running, prepare))
        except* DroppedGroups:
            pass

    def _add_groups(self, running: asyncio.TaskGroup, prepared: PreparedGroups) -> None:
        groups: dict[str, list[Row]] = {}
        for row in prepared.rows:
            groups.setdefault(row["group_id"], []).append(row)
        for group_id, members in groups.items():
            if group_id in self.live.keys() | self.waiting.keys() | self.begun:
                continue
            if self.plan.isolation.isolates(group_id):
                self.waiting[group_id] = members, prepared.tasks
            else:
                self.live[group_id] = running.create_task(self._sample_or_leave(group_id, members, prepared.tasks))

    async def _follow_stream(self, running: asyncio.TaskGroup, prepare: Callable[[pa.Table], PreparedGroups]) -> None:
        """Stop groups that are not wanted any more, and go on with newer policies, as long as something is sampled.

        Raises DroppedGroups where a newer policy stops all of it.
        """
        while self.live:
            await asyncio.sleep(POLICY_SECONDS)
            self._stop_expired()
            if not self.plan.outdated():
                continue
            if self.plan.drops_begun:
                raise DroppedGroups
            if self.plan.renew is None or self.is_isolating:
                continue
            # Nothing is committed until the engine is known to serve the right weights.
            async with self.commit_lock:
                self.runner.begin_exchange()
                renewal = await asyncio.to_thread(self._renew, self.plan.renew)
                self.runner.end_exchange()
            if renewal:
                self.runner.renew(renewal.policy, renewal.served)
                self._add_groups(running, prepare(renewal.assignments))

    def _stop_expired(self) -> None:
        # Each once: a second cancellation would strike what the first one waits for.
        expired = set(self.plan.expired([*self.live])) - self.stopped
        for group_id in expired:
            self.live[group_id].cancel()
        self.stopped |= expired
        self.servers.forget(expired)

    def _renew(self, renew: Callable[[], Renewal | None]) -> Renewal | None:
        try:
            return renew()
        except EngineLost as error:
            raise ServiceLost("the engine", self.runner.served[OF_POLICY].url, str(error)) from error

    async def _sample_or_leave(self, group_id: str, members: list[Row], tasks: Mapping[tuple[str, str], str]) -> None:
        try:
            while not await self.replicas.run(group_id, partial(self._sample_group, group_id, members, tasks)):
                # Its rollouts went with the replica; what is left in flight is an environment server's.
                self.servers.forget({group_id})
        except* NotBegun:  # its other members wait for the limit, or have seen the same
            pass
        except* GroupIsolated:
            self.servers.forget({group_id})
            self.waiting[group_id] = members, tasks
        finally:
            del self.live[group_id]

    async def _sample_group(self, group_id: str, members: list[Row], tasks: Mapping[tuple[str, str], str]) -> None:
        texts = {tasks[row["environment"], row["example_id"]] for row in members}  # nearly always one
        parsed = {text: json.loads(text) for text in texts}
        limit = asyncio.Semaphore(1 if self.is_isolating else len(members))

        async def sample_member(row: Row) -> tuple[Rows, bool]:
            async with limit:
                return await self._sample_assignment(row, parsed[tasks[row["environment"], row["example_id"]]])

        async with asyncio.TaskGroup() as running:
            pending = [running.create_task(sample_member(row)) for row in members]
        self.replicas.finish(group_id)
        results = [task.result() for task in pending]
        # A group with a stopped member does not count: the quota is of groups that ended by themselves.
        if not any(stopped for _, stopped in results):
            self.quota.count_group(members[0]["environment"])
        rows = [rows for rows, _ in results]
        tables = trace_tables((t for traces, _ in rows for t in traces), (m for _, messages in rows for m in messages))
        if "images" in tables:
            tables |= await asyncio.to_thread(tensors_of, tables["images"], self.config.model)
        async with self.commit_lock:
            if self.runner.unproven is not None:  # the exchange failed, and all rollouts are being stopped
                return
            # Committing takes long enough to delay every rollout in flight, were it done on the event loop.
            await asyncio.to_thread(self.on_group, group_id, tables)

    async def _sample_assignment(self, assignment: Row, task: dict[str, Any]) -> tuple[Rows, bool]:
        """Return the rows of one assignment, and whether it was stopped; waits until the limit admits it."""
        if (failure := self.plan.isolation.failure(assignment)) is not None:
            return self.runner.rows_without_trace(assignment, failure, time.time(), 0.0), False
        started: float | None = None
        try:
            async with self.quota.stop_when_reached(assignment["environment"]), self.limiter:
                self._begin(assignment["group_id"])
                started = time.time()
                with self.plan.meter.rollout() if self.plan.meter else nullcontext():
                    rows = await self.servers.run(assignment, partial(self.runner.run, assignment, task))
        except StoppedEarly:
            self.servers.in_flight.pop(assignment["assignment_id"], None)
            now = time.time()
            seconds = None if started is None else now - started
            failure = straggler_failure(assignment["environment"], seconds)
            return self.runner.rows_without_trace(assignment, failure, started or now, seconds or 0.0), True
        return rows, False

    def _survive(self, lost: ServiceLost) -> bool:
        """Tell whether sampling goes on without a service that is lost: others take what it had in flight."""
        if lost.environment:
            return self.servers.reassign(lost)
        survived = self.replicas.survive(lost.address)
        if survived:
            self._follow_load()
        return survived

    def _record_loss(self, lost: ServiceLost) -> None:
        lost.is_isolated = self.plan.isolation.record(lost.in_flight, self.is_isolating)

    def _join(self, served: ServedModel) -> None:
        self.watch.add([served])
        self._follow_load()

    def _follow_load(self) -> None:
        if self.adaptive_limit:
            self.adaptive_limit.follow([self._policy_served(), *self.frozen])

    def _policy_served(self) -> ServedModel:
        """Return the policy at the replicas that are there by now."""
        first, *others = self.replicas.urls
        return replace(self.runner.served[OF_POLICY], url=first, other_urls=tuple(others))

    def _begin(self, group_id: str) -> None:
        """Begin a group with the first of its members that the limit admits; raises NotBegun where it is too late."""
        if group_id in self.begun:
            return
        if self.plan.outdated():
            raise NotBegun
        oldest = self.plan.begin(group_id, self.runner.versions_of_turns(group_id) if self.plan.turns else ())
        if self.plan.turns:
            self.runner.oldest[group_id] = oldest
        self.begun.add(group_id)

    def _add_in_flight(self, error: Exception) -> Exception:
        """Add to the loss of an environment server the rollouts that were in flight there, and count it for them."""
        if isinstance(error, ServiceLost):
            error.in_flight = self.servers.in_flight_at(error)
            self._record_loss(error)
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
    assigned = pa.array([example for _, example in wanted], pa.string())
    examples = examples.filter(pc.is_in(examples["example_id"], assigned))
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
