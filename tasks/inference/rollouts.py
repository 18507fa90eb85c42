"""Sample assignments through environment servers and the engine, and hand over groups as they finish."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tasks.inference.attempts import OF_POLICY, Attempts
from tasks.inference.engine import MODEL
from tasks.inference.liveness import ServiceLost, Watch
from tasks.inference.rows import Row, tables
from tasks.inference.scoring import Served

if TYPE_CHECKING:
    from verifiers.v1.serve.client import EnvClient

    from configs.run import View

__all__ = ["Sampling", "ServiceLost", "sample"]

OnGroup = Callable[[str, dict[str, pa.Table]], None]
NO_TEACHERS: Mapping[str, Served] = MappingProxyType({})


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
) -> None:
    """Make one rollout for each assignment; call `on_group(group_id, tables)` when a group's last member has ended.

    `config` has the sections rollout, environments, engine and model; `policy` has key and version. Environments
    that `teachers` names are sampled by those, the others by the policy: the engine at `engine_url` serves it as
    `model`. Every assignment ends as at least one traces row: a failed rollout is a row with its error. Groups are
    handed over one at a time, from a thread of their own. Raises ServiceLost where the engine or an environment
    server is gone: groups handed over before are complete, the others left nothing.
    """
    sampling = Sampling(engine_url, api_key, addresses, policy, step, config, on_group, teachers, model)
    asyncio.run(sampling.run(assignments, examples))


class Sampling:
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
    ) -> None:
        self.on_group = on_group
        self.addresses = addresses
        own = {OF_POLICY: Served(engine_url, api_key, model, policy["key"])} if engine_url else {}
        served = {**own, **teachers}
        self.watch = Watch(tuple(served.values()), addresses)
        self.clients: dict[str, EnvClient] = {}
        self.attempts = Attempts(served, self.clients, self.watch, policy, step, config)
        self.limit = asyncio.Semaphore(config.rollout.max_in_flight)
        self.handing_over = asyncio.Lock()

    async def run(self, assignments: pa.Table, examples: pa.Table) -> None:
        """Sample everything, or raise ServiceLost."""
        from verifiers.v1.serve.client import EnvClient

        rows = assignments.to_pylist()
        tasks = _tasks(examples, rows)
        self.clients.update({name: EnvClient(self.addresses[name]) for name in {row["environment"] for row in rows}})
        watching = asyncio.create_task(self.watch.run())
        sampling = asyncio.create_task(self._groups(rows, tasks))
        try:
            await asyncio.wait({watching, sampling}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            await sampling
        except ExceptionGroup as several:
            raise _cause(several) from several
        finally:
            for task in (watching, sampling):
                task.cancel()
            await asyncio.gather(watching, sampling, return_exceptions=True)
            for client in self.clients.values():
                await client.close()

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
        done = tables((t for traces, _ in results for t in traces), (m for _, messages in results for m in messages))
        async with self.handing_over:
            # Committing takes long enough to hold up every rollout under way, were it done on the event loop.
            await asyncio.to_thread(self.on_group, group_id, done)

    async def _one(self, assignment: Row, task: dict[str, Any]) -> tuple[list[Row], list[Row]]:
        """The rows of one assignment, when there is room for it."""
        async with self.limit:
            return await self.attempts.rows_of(assignment, task)


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
