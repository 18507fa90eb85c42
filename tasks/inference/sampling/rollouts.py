"""Samples assignments through environment servers and the engine, and hands over groups as they finish."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tasks.inference.engine.client import MODEL
from tasks.inference.engine.scoring import Served
from tasks.inference.sampling.adaptive_limit import AdaptiveLimit, Limiter
from tasks.inference.sampling.attempts import OF_POLICY, RolloutRunner
from tasks.inference.sampling.background_loop import LoopLag, run_in_background_loop
from tasks.inference.sampling.failures import STRAGGLER, Failure
from tasks.inference.sampling.lost_servers import ServiceLost, UnderWay, Watch, server
from tasks.inference.trace_rows.rows import Row, tables

if TYPE_CHECKING:
    from verifiers.v1.serve.client import EnvClient

    from configs.run import View


class StoppedEarly(Exception):
    """A rollout was given up because enough groups of its environment had ended."""


class GroupQuota:
    """Counts the groups that ended, by environment, and stops what is left of an environment that has enough."""

    def __init__(self, wanted: Mapping[str, int]) -> None:
        """`wanted` says how many more groups of an environment are needed; one that is not there needs all."""
        self._wanted = dict(wanted)
        self._scopes: dict[str, set[asyncio.Timeout]] = {}

    def reached(self, environment: str) -> bool:
        """Tell whether enough groups of an environment have ended."""
        return self._wanted.get(environment, 1) <= 0

    def ended(self, environment: str) -> None:
        """Count a group all of whose members have ended, by themselves; stop the others where that is enough."""
        if environment in self._wanted:
            self._wanted[environment] -= 1
            if self.reached(environment):
                now = asyncio.get_running_loop().time()
                for scope in self._scopes.pop(environment, ()):
                    scope.reschedule(now)

    @asynccontextmanager
    async def unless_reached(self, environment: str) -> AsyncIterator[None]:
        """Run the body, and cancel it once its environment has enough; raises Stopped then, and if it had before."""
        if self.reached(environment):
            raise StoppedEarly
        scope = asyncio.timeout(None)
        scopes = self._scopes.setdefault(environment, set())
        scopes.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise StoppedEarly from error
        finally:
            scopes.discard(scope)


def straggler(environment: str, seconds: float | None) -> Failure:
    """Return why a rollout has no trace that was stopped after `seconds`, or before it was begun (None)."""
    when = "before it was begun" if seconds is None else f"after {seconds:.1f} s"
    text = f"stopped {when}: enough groups of environment {environment!r} had ended (assignment.oversampling)"
    return Failure(STRAGGLER, "Stopped", text)


__all__ = ["BatchSampler", "SamplingPlan", "ServiceLost", "sample"]

OnGroup = Callable[[str, dict[str, pa.Table]], None]
Rows = tuple[list[Row], list[Row]]
NO_TEACHERS: Mapping[str, Served] = MappingProxyType({})

_log = logging.getLogger("stagecoach")


@dataclass(frozen=True)
class SamplingPlan:
    """What differs from call to call of `sample` within one stage."""

    wanted: Mapping[str, int] = field(default_factory=dict)
    """Groups after which an environment's others are stopped; one that is not there is sampled to the end."""
    one_at_a_time: bool = False
    """Whether no two rollouts are under way at once."""
    untried: Mapping[str, Failure] = field(default_factory=dict)
    """Assignments that are not tried, by id, and why: they are rows at once."""


ORDINARY = SamplingPlan()


def sample(
    assignments: pa.Table,
    examples: pa.Table,
    *,
    engine_url: str,
    api_key: str,
    addresses: Mapping[str, str],
    policy: Mapping[str, Any],
    step: int,
    config: "View",
    on_group: OnGroup,
    teachers: Mapping[str, Served] = NO_TEACHERS,
    model: str = MODEL,
    terms: SamplingPlan = ORDINARY,
) -> None:
    """Make one rollout for each assignment; call `on_group(group_id, tables)` when a group's last member has ended.

    `config` has the sections rollout, environments, engine and model; `policy` has key and version. Environments
    that `teachers` names are sampled by those, the others by the policy: the engine at `engine_url` serves it as
    `model`. Every assignment ends as at least one traces row: a failed rollout is a row with its error. Groups are
    handed over one at a time, from a thread of their own. Raises ServiceLost where the engine or an environment
    server is gone: groups handed over before are complete, the others left nothing.
    """
    sampling = BatchSampler(engine_url, api_key, addresses, policy, step, config, on_group, teachers, model, terms)
    run_in_background_loop(sampling.run(assignments, examples))


class BatchSampler:
    """One call of `sample`: the clients, the bound on what is under way, and the groups that are not complete."""

    def __init__(
        self,
        engine_url: str,
        api_key: str,
        addresses: Mapping[str, str],
        policy: Mapping[str, Any],
        step: int,
        config: "View",
        on_group: OnGroup,
        teachers: Mapping[str, Served] = NO_TEACHERS,
        model: str = MODEL,
        terms: SamplingPlan = ORDINARY,
    ) -> None:
        self.on_group = on_group
        self.addresses = addresses
        own = {OF_POLICY: Served(engine_url, api_key, model, policy["key"])} if engine_url else {}
        served = {**own, **teachers}
        engines = tuple(each for each in served.values() if not each.chat)
        self.watch = Watch(engines, addresses)
        self.clients: dict[str, EnvClient] = {}
        self.attempts = RolloutRunner(served, self.clients, self.watch, policy, step, config)
        self.terms = terms
        self.enough = GroupQuota(terms.wanted)
        self.under_way: set[UnderWay] = set()
        self.limit = Limiter(1 if terms.one_at_a_time else config.rollout.max_in_flight)
        adaptive = config.rollout.adaptive_in_flight and not terms.one_at_a_time
        self.steering = AdaptiveLimit(self.limit, engines) if adaptive else None
        self.lag = LoopLag()
        self.handing_over = asyncio.Lock()

    async def run(self, assignments: pa.Table, examples: pa.Table) -> None:
        """Sample everything, or raise ServiceLost."""
        from verifiers.v1.serve.client import EnvClient

        rows = assignments.to_pylist()
        tasks = _tasks(examples, rows)
        self.clients.update({name: EnvClient(self.addresses[name]) for name in {row["environment"] for row in rows}})
        watching = asyncio.create_task(self.watch.run())
        sampling = asyncio.create_task(self._groups(rows, tasks))
        beside = [asyncio.create_task(each.run()) for each in (self.lag, self.steering) if each]
        try:
            await asyncio.wait({watching, sampling}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            await sampling
        except ServiceLost as lost:
            raise self._with_what_it_had(lost) from lost.__cause__
        except ExceptionGroup as several:
            raise self._with_what_it_had(_cause(several)) from several
        finally:
            for task in (watching, sampling, *beside):
                task.cancel()
            ends = await asyncio.gather(watching, sampling, *beside, return_exceptions=True)
            for end in ends[2:]:  # what goes beside the rollouts stops none of them
                if isinstance(end, Exception):
                    _log.error("what looks after the limit or the event loop's lag has failed: %r", end)
            for client in self.clients.values():
                await client.close()
            _log.info("sampled %d rollouts; %s", len(rows), self.lag)

    def _with_what_it_had(self, error: Exception) -> Exception:
        """Say with the loss of an environment server which rollouts were under way there."""
        if isinstance(error, ServiceLost):
            error.under_way = [each for each in self.under_way if server(each.environment) == error.service]
        return error

    async def _groups(self, rows: list[Row], tasks: Mapping[tuple[str, str], str]) -> None:
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(row["group_id"], []).append(row)
        async with asyncio.TaskGroup() as running:
            for group_id, members in groups.items():
                running.create_task(self._group(group_id, members, tasks))

    async def _group(self, group_id: str, members: list[Row], tasks: Mapping[tuple[str, str], str]) -> None:
        async with asyncio.TaskGroup() as running:
            pending = [
                running.create_task(self._one(row, json.loads(tasks[row["environment"], row["example_id"]])))
                for row in members
            ]
        results = [task.result() for task in pending]
        if not any(stopped for _, stopped in results):
            self.enough.ended(members[0]["environment"])
        rows = [rows for rows, _ in results]
        done = tables((t for traces, _ in rows for t in traces), (m for _, messages in rows for m in messages))
        async with self.handing_over:
            # Committing takes long enough to hold up every rollout under way, were it done on the event loop.
            await asyncio.to_thread(self.on_group, group_id, done)

    async def _one(self, assignment: Row, task: dict[str, Any]) -> tuple[Rows, bool]:
        """The rows of one assignment, when there is room for it; and whether it was stopped."""
        if (failure := self.terms.untried.get(assignment["assignment_id"])) is not None:
            return self.attempts.without_trace(assignment, failure, time.time(), 0.0), False
        started: float | None = None
        try:
            async with self.enough.unless_reached(assignment["environment"]), self.limit:
                started = time.time()
                return await self._under_way(assignment, task), False
        except StoppedEarly:
            self.under_way.discard(_mark(assignment))
            now = time.time()
            seconds = None if started is None else now - started
            failure = straggler(assignment["environment"], seconds)
            return self.attempts.without_trace(assignment, failure, started or now, seconds or 0.0), True

    async def _under_way(self, assignment: Row, task: dict[str, Any]) -> Rows:
        """The rows of one assignment; what does not end by itself stays marked as under way."""
        self.under_way.add(_mark(assignment))
        rows = await self.attempts.rows_of(assignment, task)
        self.under_way.discard(_mark(assignment))
        return rows


def _mark(assignment: Row) -> UnderWay:
    return UnderWay(assignment["assignment_id"], assignment["group_id"], assignment["environment"])


def _cause(several: ExceptionGroup) -> Exception:
    """The error that stopped everything: many rollouts under way may notice the same loss of a service at once."""
    errors = list[Exception]()
    for error in several.exceptions:
        errors.append(_cause(error) if isinstance(error, ExceptionGroup) else error)
    return next((error for error in errors if isinstance(error, ServiceLost)), errors[0])


def _tasks(examples: pa.Table, assignments: Iterable[Row]) -> dict[tuple[str, str], str]:
    """The task of every example that is assigned; raises ValueError for one that is not there."""
    wanted = {(row["environment"], row["example_id"]) for row in assignments}
    columns = (examples[name].to_pylist() for name in ("environment", "example_id", "task"))
    found = {(name, example): task for name, example, task in zip(*columns, strict=True) if (name, example) in wanted}
    if missing := wanted - found.keys():
        name, example = min(missing)
        raise ValueError(f"{len(missing)} assigned examples are not in the examples table, first {name!r} {example!r}")
    return found
