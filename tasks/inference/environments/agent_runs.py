"""AgentRun: an agent's run in an episode, with the seeds of its model calls and the answers that it has already.

`play_episode` makes them in the process of an environment, one for each trace, and forgets them with the episode. The
model client (`model_client`) finds them by the trace's id. All is in the event loop of that process. A request for a
rollout names the models of frozen agents and the kept answers in a header of its client, which `play_episode` removes:
no engine sees it.
"""

import asyncio
import copy
import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tasks.inference.trace_rows.rows import STATE_FIELD, TURNS_FIELD, strict_json

if TYPE_CHECKING:
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import ClientConfig
    from verifiers.v1.env import Env

ROLLOUT_HEADER = "X-Stagecoach-Rollout"
CHAT_HEADER = "X-Stagecoach-Chat"
"""The header of a client that says how a teacher's chat API is called; it is not sent there (`chat_teacher`)."""
SEED_STRIDE = 7_919
"""Between the seeds of the runs of one episode; the first run has the request's own."""
NUM_SEEDS = 2**63
"""Engines take seeds of 63 bits."""
ENGINE_SEED_BITS = 63
MAX_UNSENT_TURNS = 4
"""Kept turns on a trace: verifiers sends a trace's info after each turn, and more are in flight in branches alone."""
MAX_STATE_BYTES = 64 * 2**10
"""Largest state, as JSON, that a rollout records."""
ABORTED = '"finish_reason":"abort"'
RANDOM_FIELDS: Any = {"tool_call_id": True, "provider_state": True, "tool_calls": {"__all__": {"id"}}}
"""Fields of a message that a chat API fills with random values; no model reads them."""
_runs: dict[str, "AgentRun"] = {}
"""By id of their traces."""


def add_header(
    client: "ClientConfig", players: Mapping[str, Any], kept_answers: Mapping[str, str] | None
) -> "ClientConfig":
    """Return the client of a request for a rollout, with models by agent and answers by request in its header.

    Without `kept_answers`, None, the turns of the rollout are not kept.
    """
    if not players and kept_answers is None:
        return client
    content = json.dumps({"players": players, "kept_answers": kept_answers})
    return client.model_copy(update={"headers": {**client.headers, ROLLOUT_HEADER: content}})


async def play_episode(
    run_episode: Callable[..., Awaitable[Any]],
    env: "Env[Any]",
    task: Any,
    context: "ModelContext",
    *,
    on_trace: Callable[[Any], None] | None = None,
    **options: Any,
) -> Any:
    """Run an episode by verifiers' `run_episode` with the players of its request, each agent run with its own seed."""
    headers = dict(context.client.headers)
    content = json.loads(headers.pop(ROLLOUT_HEADER, "{}"))
    context = replace(context, client=context.client.model_copy(update={"headers": headers}))
    players, traces = content.get("players", {}), list[Any]()

    def claim(trace: Any) -> None:
        if trace.agent.name in players:
            trace.agent.trainable = False
        _runs[trace.id] = AgentRun(trace, len(traces), content.get("kept_answers"))
        traces.append(trace)
        if on_trace:
            on_trace(trace)

    try:
        episode = await run_episode(env_with_players(env, players), task, context, on_trace=claim, **options)
        for trace in traces:
            record_state(trace)
        return episode
    except BaseException as error:
        if isinstance(error, (Exception, asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)):
            raise
        # verifiers' server answers a request with an Exception alone: of another its caller would hear nothing.
        raise type(type(error).__name__, (Exception,), {})(*error.args) from error
    finally:
        for trace in traces:
            _runs.pop(trace.id)


def record_state(trace: Any) -> None:
    """Note the state of a trace's rollout on its info, where the environment declares one of its own that is data.

    Left out are states with files of a sandbox, states above MAX_STATE_BYTES, and those that JSON does not give back.
    """
    from verifiers.v1.state import State

    if type(trace.state) is State or trace.state.artifacts:
        return
    with suppress(Exception):  # of the environment's classes: what cannot be written and read is not recorded
        content = trace.state.model_dump(mode="json")
        text = strict_json(content)
        if len(text) <= MAX_STATE_BYTES and type(trace.state).model_validate_json(text) == trace.state:
            trace.info[STATE_FIELD] = content


def agent_run(trace_id: str | None) -> "AgentRun | None":
    """Return the run of a trace; None for one that no episode of this process has."""
    return _runs.get(trace_id or "")


def env_with_players(env: "Env[Any]", players: Mapping[str, Any]) -> "Env[Any]":
    """Return the environment with players bound to its agents; the copy shares everything else with `env`."""
    if not players:
        return env
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields

    agents = agent_config_fields(env.config)
    bound = {}
    for name, player in players.items():
        if name not in agents:
            raise ValueError(f"bindings: the environment has no seat {name!r}; it has {', '.join(agents)}")
        requested = AgentConfig.model_validate(player)
        # The agent's own settings override the request's.
        settings = agents[name].sampling.model_dump(exclude_unset=True) if agents[name].sampling else {}
        assert requested.sampling is not None, "a player has sampling parameters"
        sampling = requested.sampling.model_copy(update=settings)
        changes = {"client": requested.client, "model": requested.model, "sampling": sampling}
        bound[name] = agents[name].model_copy(update=changes)
    # A shallow copy: tool servers and interception, which the episodes of a server share, stay the same objects.
    copied = copy.copy(env)
    copied.config = env.config.model_copy(update=bound)
    return copied


class AgentRun:
    """One agent's run: its trace, the seeds of its calls, and its kept answers by request (None: none are kept)."""

    def __init__(self, trace: Any, number: int, kept_answers: Mapping[str, str] | None) -> None:
        """Give the run of this `number` in its episode a seed, and note it on the trace."""
        self.trace, self.kept_answers = trace, kept_answers
        config = trace.agent.config
        seed = getattr(config.sampling, "seed", None)
        if number and seed is not None:
            seed = (seed + number * SEED_STRIDE) % NUM_SEEDS
            sampling = config.sampling.model_copy(update={"seed": seed})
            trace.agent.config = config.model_copy(update={"sampling": sampling})
        self.seeds = None if seed is None else CallSeeds(seed)

    def keep(self, request: str, model: str, answer: str) -> None:
        """Have the answer to a request sent to the sampler, unless an engine that was ended has cut it off."""
        if self.kept_answers is not None and ABORTED not in answer:
            turns = self.trace.info.setdefault(TURNS_FIELD, [])
            turns.append({"request": request, "model": model, "answer": answer})
            del turns[:-MAX_UNSENT_TURNS]


class CallSeeds:
    """The seeds of the model calls of one agent run.

    The first call keeps the run's seed, so a rollout of one turn is sampled by the seed of its assignment. Calls that
    begin before the first has ended are not the first: their seeds depend on their prompts alone. A call that fails, or
    is cancelled, has drawn nothing that was read: when it is sent again it has the same seed.
    """

    def __init__(self, run_seed: int) -> None:
        self._run_seed = run_seed
        self._first_prompt: str | None = None
        self._repetitions: dict[str, set[int]] = {}
        """By digest of a prompt, the numbers of its calls that are answered or in flight."""

    @contextmanager
    def call(self, messages: Sequence[Any], bits: int = ENGINE_SEED_BITS) -> Iterator[int]:
        """Yield the seed of a call with these messages, which is made in the block."""
        prompt = prompt_digest(messages)
        taken = self._repetitions.setdefault(prompt, set())
        repetition = next(number for number in itertools.count() if number not in taken)
        taken.add(repetition)
        if self._first_prompt is None:
            self._first_prompt = prompt
        is_first = prompt == self._first_prompt and repetition == 0
        try:
            yield self._run_seed if is_first else call_seed(self._run_seed, prompt, repetition, bits)
        except BaseException:  # a cancelled call too: no reader has its draws
            taken.discard(repetition)
            raise


def call_seed(run_seed: int, prompt: str, repetition: int, bits: int = ENGINE_SEED_BITS) -> int:
    """Return the seed of one model call, in 0 .. 2**bits - 1.

    Hashes, by BLAKE2b, the seed of the agent run (of assignment, attempt and place in the episode), the digest of the
    call's prompt, and the number of calls with the same prompt before it in the run. The engine begins a generator for
    each request: with one seed for two calls, both would draw the same random numbers. The prompt, unlike the number of
    the turn, does not depend on the order in which parallel branches of a run reach the engine, so a run that is played
    again after a crash asks for the same seeds. Two calls with one prompt (a fork, a second try after a reply that
    could not be read) differ in `repetition`.
    """
    parts = f"call\x1f{run_seed}\x1f{prompt}\x1f{repetition}"
    return int.from_bytes(hashlib.blake2b(parts.encode(), digest_size=8).digest()) >> (64 - bits)


def prompt_digest(messages: Sequence[Any]) -> str:
    """Return the digest of a call's messages, without what a chat API draws at random."""
    from pydantic_core import to_json

    content = [message.model_dump(mode="json", exclude=RANDOM_FIELDS) for message in messages]
    return hashlib.sha256(to_json(content)).hexdigest()


def request_digest(body: Mapping[str, Any]) -> str:
    """Return the digest of a request, the salt of its cache left out: another policy has another one."""
    content = {name: body[name] for name in sorted(body) if name != "cache_salt"}
    return hashlib.sha256(json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()
