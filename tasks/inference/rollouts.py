"""Sample assignments through environment servers and the engine, and hand over groups as they finish."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tasks.inference import model_info
from tasks.inference.engine import MODEL, Engine
from tasks.inference.failures import Failure, from_error
from tasks.inference.liveness import ServiceLost, Watch
from tasks.inference.rows import Attempted, Row, of_failure, of_trace_record, tables
from tasks.inference.scoring import Served

if TYPE_CHECKING:
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.serve.client import EnvClient
    from verifiers.v1.types import SamplingConfig

    from configs.run import View

__all__ = ["Sampling", "ServiceLost", "sample"]

OnGroup = Callable[[str, dict[str, pa.Table]], None]
RETRY_SEED_STRIDE = 1_000_003
RETRY_SECONDS = 0.25
NO_KEY = "EMPTY"
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
        self.rollout = config.rollout
        self.environments = {environment.name: environment for environment in config.environments}
        self.policy = policy
        self.step = step
        self.on_group = on_group
        self.addresses = addresses
        self.teachers = teachers
        own = {"": Served(engine_url, api_key, model, policy["key"])} if engine_url else {}
        self.served = {**own, **teachers}
        """Who samples, by environment; the policy under ""."""
        # A teacher without a key is not to be sent the one that environment servers have for the policy's engine.
        self.client_configs = {
            name: _client_config(each.url, each.api_key or (NO_KEY if name else ""), config)
            for name, each in self.served.items()
        }
        self.watch = Watch(tuple(self.served.values()), addresses)
        self.clients: dict[str, EnvClient] = {}
        self.limit = asyncio.Semaphore(config.rollout.max_in_flight)
        self.handing_over = asyncio.Lock()

    async def run(self, assignments: pa.Table, examples: pa.Table) -> None:
        """Sample everything, or raise ServiceLost."""
        from verifiers.v1.serve.client import EnvClient

        rows = assignments.to_pylist()
        tasks = _tasks(examples, rows)
        self.clients = {name: EnvClient(self.addresses[name]) for name in {row["environment"] for row in rows}}
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
        """The rows of one assignment, whatever happens to it."""
        async with self.limit:
            started, clock = time.time(), time.monotonic()
            attempted = self._attempted(assignment)
            try:
                async with asyncio.timeout(self.rollout.timeout_seconds):
                    return await self._attempts(attempted, task, started)
            except TimeoutError:
                message = f"the rollout took longer than rollout.timeout_seconds = {self.rollout.timeout_seconds:g}"
                failure = Failure("timeout", "TimeoutError", message)
            return [of_failure(failure, attempted, started, time.monotonic() - clock)], []

    def _attempted(self, assignment: Row) -> Attempted:
        own = self.environments[assignment["environment"]].temperature
        temperature = self.rollout.temperature if own is None else own
        if assignment["environment"] in self.teachers:  # no policy of the store, and never stale
            return Attempted(assignment, "", self.step, self.step, temperature)
        return Attempted(assignment, self.policy["key"], self.policy["version"], self.step, temperature)

    async def _attempts(
        self, attempted: Attempted, task: dict[str, Any], started: float
    ) -> tuple[list[Row], list[Row]]:
        seed = attempted.assignment["seed"]
        for attempt in range(self.rollout.max_attempts):
            clock = time.monotonic()
            rows, failure = await self._attempt(attempted, task, seed)
            last = attempt + 1 == self.rollout.max_attempts
            if failure is not None and failure.kind == "infrastructure":
                await self.watch.check()  # a service that is gone is not this rollout's failure
            if failure is None or last or not failure.retryable:
                break
            if failure.kind == "model":
                seed += RETRY_SEED_STRIDE  # the same seed would sample the same response
            await asyncio.sleep(RETRY_SECONDS * 2**attempt)
        if rows is None:
            assert failure is not None, "an attempt without rows has failed"
            return [of_failure(failure, attempted, started, time.monotonic() - clock)], []
        return rows

    async def _attempt(
        self, attempted: Attempted, task: dict[str, Any], seed: int
    ) -> tuple[tuple[list[Row], list[Row]] | None, Failure | None]:
        """One rollout: its rows, where it left a trace, and what went wrong, where something did."""
        client = self.clients[attempted.assignment["environment"]]
        sampler = self._sampler(attempted)
        try:
            episode = await client.run(
                self.client_configs[sampler], self.served[sampler].model, self._sampling(attempted, seed), task
            )
        except RuntimeError as error:
            # How the client says that the server refused the request, with the type's name in front.
            kind, _, message = str(error).partition(": ")
            return None, from_error({"type": kind, "message": message or str(error)})
        return _episode_rows(episode, attempted)

    def _sampler(self, attempted: Attempted) -> str:
        name = attempted.assignment["environment"]
        return name if name in self.teachers else ""

    def _sampling(self, attempted: Attempted, seed: int) -> "SamplingConfig":
        from verifiers.v1.types import SamplingConfig

        return SamplingConfig.model_validate(
            {
                "temperature": attempted.temperature,
                "top_p": self.rollout.top_p,
                "max_tokens": self.rollout.max_tokens,
                "seed": seed,
                "cache_salt": self.served[self._sampler(attempted)].salt,  # states of other weights are never reused
                "detokenize": False,  # the environment server reads the tokens itself
            }
        )


def _cause(several: ExceptionGroup) -> Exception:
    """The error that stopped everything: many rollouts under way may notice the same loss of a service at once."""
    errors = list[Exception]()
    for error in several.exceptions:
        errors.append(_cause(error) if isinstance(error, ExceptionGroup) else error)
    return next((error for error in errors if isinstance(error, ServiceLost)), errors[0])


def _episode_rows(
    episode: "WireEpisode", attempted: Attempted
) -> tuple[tuple[list[Row], list[Row]] | None, Failure | None]:
    """The rows of an episode and the first failure in it; an error of the episode counts for its faultless traces."""
    traces, messages, failures = [], [], []
    whole = from_error(episode.errors[-1].model_dump()) if episode.errors and not episode.ok else None
    for trace in episode.traces:
        row, own = of_trace_record(trace, attempted, episode.id)
        if whole is not None and row["error_class"] is None:
            row |= {"reward": None, "error_class": whole.kind, "error_type": whole.type}
            row |= {"error_message": whole.message, "error_traceback": whole.traceback}
        if row["error_class"] is not None:
            failures.append(
                Failure(row["error_class"], row["error_type"], row["error_message"], row["error_traceback"])
            )
        traces.append(row)
        messages += own
    if not traces:
        nothing = Failure("incomplete", "NoTrace", "the environment ran no agent and recorded no error")
        return None, whole or nothing
    return (traces, messages), next(iter(failures), None)


def _client_config(engine_url: str, api_key: str, config: "View") -> "TrainClientConfig":
    """Where and how an environment server calls the engine: tokens in, tokens out, with the run's renderer.

    The key travels with the request, so that a server that someone else runs needs nothing of ours and no program
    that a model drives finds it in its environment. It is taken out of the rows (`rows.wire_record`).
    """
    from verifiers.v1.configs.client import TrainClientConfig

    tokenizer = config.model.tokenizer or config.model.path or Engine(engine_url, api_key).model_directory()
    return TrainClientConfig(
        base_url=f"{engine_url.rstrip('/')}/v1",
        api_key_var=config.engine.api_key_variable,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        renderer=model_info.renderer_config(config.model.renderer, tokenizer, config.model.renderer_settings),
        renderer_model_name=tokenizer,
    )


def _tasks(examples: pa.Table, assignments: Iterable[Row]) -> dict[tuple[str, str], str]:
    """The task of every example that is assigned; raises ValueError for one that is not there."""
    wanted = {(row["environment"], row["example_id"]) for row in assignments}
    columns = (examples[name].to_pylist() for name in ("environment", "example_id", "task"))
    found = {(name, example): task for name, example, task in zip(*columns, strict=True) if (name, example) in wanted}
    if missing := wanted - found.keys():
        name, example = min(missing)
        raise ValueError(f"{len(missing)} assigned examples are not in the examples table, first {name!r} {example!r}")
    return found
