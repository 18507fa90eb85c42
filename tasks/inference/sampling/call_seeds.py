"""SeededClient: the model client of one agent run, which gives every model call a random stream of its own.

Owns the seeds of the calls of one run. `SeededInterception` puts it between verifiers' interception server and its
client, so single requests, batches, chat APIs and calls whose answers are kept all see the same seed. Runs in the event
loop of an environment's process.
"""

import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any

from pydantic_core import to_json
from verifiers.v1.clients import Client
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception import Interception

ENGINE_SEED_BITS = 63
CHAT_API_SEED_BITS = 31
"""Chat APIs take 32 bits with a sign."""
RANDOM_FIELDS: Any = {"tool_call_id": True, "provider_state": True, "tool_calls": {"__all__": {"id"}}}
"""Fields of a message that a chat API fills with random values; no model reads them."""


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
    content = [message.model_dump(mode="json", exclude=RANDOM_FIELDS) for message in messages]
    return hashlib.sha256(to_json(content)).hexdigest()


class SeededClient(Client):  # type: ignore[misc]
    """Calls `client` for one agent run, each call with its own seed.

    The first call keeps `run_seed`, so a rollout of one turn is sampled by the seed of its assignment. Calls that begin
    before the first has ended are not the first: their seeds depend on their prompts alone. A call that fails, or is
    cancelled, has drawn nothing that anybody read: when it is sent again it has the same seed.
    """

    def __init__(self, client: Client, run_seed: int, bits: int) -> None:
        self._client, self._run_seed, self._bits = client, run_seed, bits
        self._first_prompt: str | None = None
        self._repetitions: dict[str, set[int]] = {}
        """By digest of a prompt, the numbers of its calls that are answered or in flight."""

    async def get_response(
        self, dialect: Any, body: dict[str, Any], sampling: Any, turn: Any = None, **others: Any
    ) -> Any:
        """Return the reply to one call; raises what the client raises."""
        with self._seed(dialect.parse_request(body).messages if turn is None else turn.prompt) as seed:
            body["seed"] = seed  # in place: the trace records the body as what was sent
            sampling = sampling.model_copy(update={"seed": seed})
            return await self._client.get_response(dialect, body, sampling, turn=turn, **others)

    async def relay(self, dialect: Any, body: dict[str, Any], **others: Any) -> Any:
        """Return the streamed reply of a chat API to one call; raises what the client raises."""
        with self._seed(dialect.parse_request(body).messages) as seed:
            body["seed"] = seed
            return await self._client.relay(dialect, body, **others)

    async def relay_aux(self, *arguments: Any, **others: Any) -> Any:
        """Return the reply to a request that samples nothing."""
        return await self._client.relay_aux(*arguments, **others)

    @contextmanager
    def _seed(self, messages: Sequence[Any]) -> Iterator[int]:
        prompt = prompt_digest(messages)
        taken = self._repetitions.setdefault(prompt, set())
        repetition = next(number for number in count() if number not in taken)
        taken.add(repetition)
        if self._first_prompt is None:
            self._first_prompt = prompt
        is_first = prompt == self._first_prompt and repetition == 0
        try:
            yield self._run_seed if is_first else call_seed(self._run_seed, prompt, repetition, self._bits)
        except BaseException:  # a cancelled call too: no reader has its draws
            taken.discard(repetition)
            raise


class SeededInterception(Interception):  # type: ignore[misc]
    """Lends a slot of another interception, whose owner starts and stops it, to one agent run with its own seeds."""

    def __init__(self, interception: Interception, run_seed: int) -> None:
        super().__init__()
        self._interception, self._run_seed = interception, run_seed

    async def start(self) -> None:
        """Do nothing: the owner has started the interception."""

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[tuple[str, str, str]]:
        """Yield the slot of a run once its session calls the model by a SeededClient."""
        async with self._interception.acquire(session) as slot:
            # The session has its client only now, and its program has not begun.
            bits = ENGINE_SEED_BITS if isinstance(session.ctx.client, TrainClientConfig) else CHAT_API_SEED_BITS
            session.client = SeededClient(session.client, self._run_seed, bits)
            yield slot


def seed_calls(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an agent run whose calls get seeds of their own; one without a seed stays without."""
    run_seed = getattr(params["ctx"].sampling, "seed", None)
    if run_seed is None:
        return dict(params)
    return {**params, "interception": SeededInterception(params["interception"], run_seed)}
