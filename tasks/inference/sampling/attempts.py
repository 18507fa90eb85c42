"""Tries one assignment until it leaves rows: the request to its environment server, retries, failures as rows."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tasks.inference.engine import model_info
from tasks.inference.engine.client import Engine
from tasks.inference.engine.scoring import Served
from tasks.inference.sampling.failures import Failure, from_error
from tasks.inference.sampling.lost_servers import Watch
from tasks.inference.sampling.seats import SeatClient, Seats
from tasks.inference.trace_rows.rows import Attempted, Row, error_columns, of_failure, of_trace_record

if TYPE_CHECKING:
    from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.serve.client import EnvClient
    from verifiers.v1.types import SamplingConfig

    from configs.evaluation import ExternalModelConfig
    from configs.run import View


SEEDS = 2**30
"""Chat APIs take smaller seeds than ours are: of 31 bits, and the seats of an episode add to theirs."""


def client_config(engine_url: str, api_key: str, config: "View") -> "TrainClientConfig":
    """Return where and how an environment server calls the engine: tokens in, tokens out, with the run's renderer.

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


def chat_client_config(external: "ExternalModelConfig") -> "EvalClientConfig":
    """Return where and how an environment server calls a chat API of someone else: messages in, messages out.

    The key is read where the server runs, from the variable that is named: it travels with no request.
    """
    from verifiers.v1.configs.client import EvalClientConfig

    return EvalClientConfig(base_url=external.url, api_key_var=external.api_key_variable)


def chat_sampling_config(
    external: "ExternalModelConfig", config: "View", temperature: float, seed: int
) -> "SamplingConfig":
    """Return how a chat API is asked to sample; `external.settings` go before what the run says."""
    from verifiers.v1.types import SamplingConfig

    ours = {"temperature": temperature, "top_p": config.rollout.top_p, "max_tokens": config.rollout.max_tokens}
    return SamplingConfig.model_validate({**ours, "seed": seed % SEEDS, **external.settings})


def sampling_config(config: "View", temperature: float, seed: int, salt: str) -> "SamplingConfig":
    """Return how the tokens of one rollout are sampled.

    The cache is salted: states computed with other weights are never reused.
    """
    from verifiers.v1.types import SamplingConfig

    return SamplingConfig.model_validate(
        {
            "temperature": temperature,
            "top_p": config.rollout.top_p,
            "max_tokens": config.rollout.max_tokens,
            "seed": seed,
            "cache_salt": salt,
            "detokenize": False,  # the environment server reads the tokens itself
        }
    )


RETRY_SEED_STRIDE = 1_000_003
RETRY_SECONDS = 0.25
NO_KEY = "EMPTY"
KNOWN = "episode_error"
"""Field of a trace's info by which an environment says that it knew of a failure when it scored what was left."""
OF_POLICY = ""
"""Under what name the policy's engine is kept beside those of teachers, which go by environment."""


class RolloutRunner:
    """Tries assignments with the model that samples their environment, and tries again what may go better."""

    def __init__(
        self,
        served: Mapping[str, Served],
        clients: "Mapping[str, EnvClient]",
        watch: Watch,
        policy: Mapping[str, Any],
        step: int,
        config: "View",
    ) -> None:
        self.served = served
        """Who samples, by environment; the policy under OF_POLICY, models of frozen seats under `seats.served_as`."""
        self.clients = clients
        """The servers of the environments, by name."""
        self.watch = watch
        self.policy = policy
        self.step = step
        self.config = config
        self.environments = {environment.name: environment for environment in config.environments}
        # A teacher without a key is not to be sent the one that environment servers have for the policy's engine.
        self.client_configs = {
            name: chat_client_config(each.chat)
            if each.chat
            else client_config(each.url, each.api_key or (NO_KEY if name else ""), config)
            for name, each in served.items()
        }
        self.seats = {each.name: Seats.of(each, served, self.client_configs) for each in config.environments}

    async def rows_of(self, assignment: Row, task: dict[str, Any]) -> tuple[list[Row], list[Row]]:
        """Return the traces and messages rows of one assignment, whatever happens to it."""
        started, clock = time.time(), time.monotonic()
        attempted = self._attempted(assignment)
        seconds = self.config.rollout.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._attempts(attempted, task, started)
        except TimeoutError:
            message = f"the rollout took longer than rollout.timeout_seconds = {seconds:g}"
            failure = Failure("timeout", "TimeoutError", message)
        return [of_failure(failure, attempted, started, time.monotonic() - clock)], []

    def without_trace(
        self, assignment: Row, failure: Failure, started: float, seconds: float
    ) -> tuple[list[Row], list[Row]]:
        """Return the rows of an assignment of which there is nothing but a failure."""
        return [of_failure(failure, self._attempted(assignment), started, seconds)], []

    def _attempted(self, assignment: Row) -> Attempted:
        own = self.environments[assignment["environment"]].temperature
        temperature = self.config.rollout.temperature if own is None else own
        if assignment["environment"] in self.served:  # no policy of the store, and never stale
            return Attempted(assignment, "", self.step, self.step, temperature)
        return Attempted(assignment, self.policy["key"], self.policy["version"], self.step, temperature)

    async def _attempts(
        self, attempted: Attempted, task: dict[str, Any], started: float
    ) -> tuple[list[Row], list[Row]]:
        seed = attempted.assignment["seed"]
        for attempt in range(self.config.rollout.max_attempts):
            clock = time.monotonic()
            rows, failure = await self._attempt(attempted, task, seed)
            last = attempt + 1 == self.config.rollout.max_attempts
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
        name, sampler = attempted.assignment["environment"], self._sampler(attempted)
        asked, seats = SeatClient(self.client_configs[sampler], self.served[sampler].model), self.seats[name]
        try:
            episode = await self.clients[name].run(
                seats.told(asked.client), asked.model, self._sampling(attempted, seed), task
            )
        except RuntimeError as error:
            # How the client says that the server refused the request, with the type's name in front.
            kind, _, message = str(error).partition(": ")
            return None, from_error({"type": kind, "message": message or str(error)})
        return episode_rows(episode, attempted, seats, asked)

    def _sampler(self, attempted: Attempted) -> str:
        name = attempted.assignment["environment"]
        return name if name in self.served else OF_POLICY

    def _sampling(self, attempted: Attempted, seed: int) -> "SamplingConfig":
        served = self.served[self._sampler(attempted)]
        if served.chat:
            return chat_sampling_config(served.chat, self.config, attempted.temperature, seed)
        return sampling_config(self.config, attempted.temperature, seed, served.salt)


def episode_rows(
    episode: "WireEpisode", attempted: Attempted, seats: Seats, asked: SeatClient
) -> tuple[tuple[list[Row], list[Row]] | None, Failure | None]:
    """The rows of an episode and what went wrong first in it.

    An agent's own error is its own row's: the others keep what they earned, since the environment went on to score
    them. Not so where the failed agent is never trained (a user, an opponent, a judge) and its model or machine failed:
    what the policy earned with part of its world gone is no reward, unless the environment scored it in that knowledge
    (KNOWN). Nor where the episode has an error: what its traces earned so far is in `rewards`. Where an environment
    tries episodes again by itself, errors of its earlier tries cannot be told from that and count as such, if a trace
    failed.
    """
    traces, messages = [], []
    for trace in episode.traces:
        row, own = of_trace_record(trace, attempted, episode.id)
        traces.append(row | seats.columns(trace, asked, attempted))
        messages += own
    whole = from_error(episode.errors[-1].model_dump()) if episode.errors and not episode.ok else None
    if not traces:
        nothing = Failure("incomplete", "NoTrace", "the environment ran no agent and recorded no error")
        return None, whole or nothing
    cause = _cause([failure for row in traces if (failure := _failure(row))], whole)
    spoilt = whole or _of_the_world(traces)
    for row, trace in zip(traces, episode.traces, strict=True):
        stands = whole is None and (not row["trainable"] or KNOWN in trace.info)
        if spoilt is not None and row["error_class"] is None and not stands:
            row |= {"reward": None, **error_columns(spoilt)}
    return (traces, messages), cause


def _failure(row: Row) -> Failure | None:
    if row["error_class"] is None:
        return None
    return Failure(row["error_class"], row["error_type"], row["error_message"], row["error_traceback"])


def _cause(own: Sequence[Failure], whole: Failure | None) -> Failure | None:
    """What the others follow from: an agent's own error, then the episode's; not to be scored comes of either."""
    causes = [each for each in own if each.kind != "incomplete"]
    return next(iter([*causes, *filter(None, [whole]), *own]), None)


def _of_the_world(traces: Iterable[Row]) -> Failure | None:
    """The first failure of a model or machine behind an agent that is never trained."""
    for row in traces:
        failure = None if row["trainable"] else _failure(row)
        if failure is not None and failure.retryable:
            return replace(failure, message=f"agent {row['agent']!r} of its episode failed: {failure.message}")
    return None
