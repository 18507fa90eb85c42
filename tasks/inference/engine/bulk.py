"""The routes of the engine's process beside vLLM's own: many requests in one call, and the checksum of the weights.

`POST /inference/v1/in_turn` takes `{"requests": [CALL, ...]}`, each CALL with the `method` and `path` of any route of
this server, its `params` and its `body` as JSON. They are sent to these routes one after the other, up to the first
that fails, also where the client hangs up meanwhile. The answer is `{"answers": [[STATUS, TEXT], ...]}`.

`POST /inference/v1/generate_many` takes `{"requests": [BODY, ...]}`, each BODY what `/inference/v1/generate` takes. The
answer is a line of JSON for each request as soon as it is finished, `[index, status, body]`, where status and body are
what the single route answers for that request: an error is that request's own. Lines that are finished in the same
forward pass come in one chunk. A client that hangs up aborts what is unfinished of its call.

`POST /inference/v1/abort_many` takes `{"request_ids": [ID, ...]}`, ids that clients gave their requests. The line of an
aborted request comes at once, with the finish reason "abort" and what tokens were already handed over. An id that is
not under way (not yet, or no longer) is passed over.

A bulk call whose header POLICIES_HEADER is set gets `"policies": [[KEY, COUNT], ...]` with each answer: so many tokens
were sampled with the policy of that key, in the order of the tokens.

`POST /inference/v1/count_tokens` counts what the requests in flight have so far as sampled with the policy that is
served (`token_policies`). It answers `{"requests": {ID: COUNT}}`, and 409 where the engine is not paused.

`POST /inference/v1/weights_sum` answers `{"workers": [SUM, ...]}`, where SUM is what `read_back.ReadBack` returns.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs
from vllm.entrypoints.scale_out.token_in_token_out import api_router
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler
from vllm.entrypoints.serve.exception_handling.handlers.vllm_error import vllm_error_handler
from vllm.exceptions import VLLMError
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import RequestOutputCollector

from tasks.inference.engine.client import POLICIES_HEADER
from tasks.inference.engine.token_policies import Run, close_counts, note_policies, policies_of, watch_policies

LOWEST_LOGPROB = -9999.0
"""What the single route writes in place of anything lower, which JSON cannot hold."""
NOT_PAUSED = 409
ID_PREFIX = "generate-tokens-"
"""What the single route puts before the id that a client gave its request."""
LARGEST_SEED = 2**63 - 1
"""A larger one is left to vLLM to check."""
_aborting: set[asyncio.Task[None]] = set()
"""Held until they are done: the event loop does not hold its tasks."""


class BulkBodies(msgspec.Struct):
    """The body of a bulk call; each request is checked by itself."""

    requests: list[Any]


class BulkIdentifiers(msgspec.Struct):
    """The body of a call that aborts requests."""

    request_ids: list[str]


class CallInTurn(msgspec.Struct):
    """A request to a route of this server."""

    method: str
    path: str
    params: dict[str, str] | None = None
    body: dict[str, Any] | None = None


class CallsInTurn(msgspec.Struct):
    """The body of a call that sends requests in turn."""

    requests: list[CallInTurn]


def add_routes() -> None:
    """Add the routes to those that vLLM's server is going to attach; they ask for the same key."""
    watch_policies()
    for handle in (generate_many, abort_many, in_turn, count_tokens, weights_sum):
        api_router.router.add_api_route(f"/inference/v1/{handle.__name__}", handle, methods=["POST"])


async def generate_many(raw_request: Request) -> Response:
    """Answer many requests, with a line for each."""
    bodies = msgspec.json.decode(await raw_request.body(), type=BulkBodies).requests
    return StreamingResponse(BulkCall(raw_request, bodies).chunks(), media_type="application/x-ndjson")


async def abort_many(raw_request: Request) -> Response:
    """Abort requests by the ids that their clients gave them."""
    given = msgspec.json.decode(await raw_request.body(), type=BulkIdentifiers).request_ids
    await raw_request.app.state.engine_client.abort([ID_PREFIX + each for each in given])
    return Response(status_code=200)


async def in_turn(raw_request: Request) -> Response:
    """Answer requests one after the other, up to the first that fails."""
    calls = msgspec.json.decode(await raw_request.body(), type=CallsInTurn).requests
    answers: list[tuple[int, str]] = []
    for call in calls:
        answers.append(await _answer(raw_request, call))
        if answers[-1][0] != HTTPStatus.OK:
            break
    return Response(msgspec.json.encode({"answers": answers}), media_type="application/json")


async def _answer(raw_request: Request, call: CallInTurn) -> tuple[int, str]:
    """Return status and text of what a route answers to a request that came within another one."""
    content = [b"" if call.body is None else msgspec.json.encode(call.body)]
    about = {
        "method": call.method,
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": urlencode(call.params or {}).encode(),
        "headers": [(b"content-type", b"application/json")],
    }
    sent = list[dict[str, Any]]()

    async def receive() -> Any:
        # Then as long as nobody hangs up: routes wait for that while they work.
        return {"type": "http.request", "body": content.pop()} if content else await raw_request.receive()

    async def send(message: Any) -> None:
        sent.append(message)

    # The routes alone: what stands before them, as the check of the key, was passed by the request around.
    await raw_request.app.router({**raw_request.scope, **about}, receive, send)
    text = b"".join(each.get("body", b"") for each in sent[1:])
    return sent[0]["status"], text.decode()


async def count_tokens(raw_request: Request) -> Response:
    """Count the tokens of all requests in flight as those of the policy that is served."""
    engine = raw_request.app.state.engine_client
    if not await engine.is_paused():
        return JSONResponse({"error": "tokens are counted while the engine is paused"}, status_code=NOT_PAUSED)
    return JSONResponse({"requests": await close_counts(engine)})


async def weights_sum(raw_request: Request) -> dict[str, Any]:
    """Answer with the checksum of the weights that each worker holds."""
    return {"workers": await raw_request.app.state.engine_client.collective_rpc("weights_sum")}


InCore = tuple[RequestOutputCollector, EngineCoreRequest | None]
"""What a request's outputs are put into, and what others like it may be sent as."""


class Admission:
    """Stands before vLLM's client of the engine core: a request is admitted, and its output not waited for."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt: Any, parameters: SamplingParams, request_id: str, **named: Any) -> InCore:
        """Admit a request; return what its outputs are put into, and what the core was sent where others are alike."""
        engine = self._engine
        if parameters.n > 1 or parameters.prompt_logprobs is not None:
            return await engine.add_request(request_id, prompt, parameters, **named), None
        tasks = await engine.get_supported_tasks()
        sent = engine.input_processor.process_inputs(request_id, prompt, parameters, supported_tasks=tasks, **named)
        return await self.send(copy(sent)), None if sent.mm_features else sent

    async def send(self, request: EngineCoreRequest) -> RequestOutputCollector:
        """Send the core a request for one sequence; as vLLM's `add_request` does with what it made of a prompt."""
        engine = self._engine
        engine.input_processor.assign_request_id(request)
        engine._run_output_handler()
        outputs = RequestOutputCollector(request.params.output_kind, request.request_id)
        await engine._add_request(request, None, None, 0, outputs)
        return outputs


@dataclass(frozen=True)
class Admitted:
    """A request that the engine core has: what to answer with as soon as its output is there."""

    request: GenerateRequest
    outputs: RequestOutputCollector
    rest: tuple[Any, ...]
    sent: EngineCoreRequest | None = None
    """What others like it may be sent as."""


@dataclass(frozen=True)
class OwnPart:
    """The part of a request's body that tells it from others of its group."""

    request_id: str | None
    seed: int
    rest: dict[object, Any]
    """The body without that part."""

    @classmethod
    def of(cls, body: Any) -> "OwnPart | None":
        """Return the own part; None where a body has none, or one that has to be checked."""
        match body:
            case {"sampling_params": {"seed": int(seed), **parameters}, **rest}:
                request_id = rest.pop("request_id", None)
                if isinstance(request_id, str | None) and type(seed) is int and 0 <= seed <= LARGEST_SEED:
                    return cls(request_id, seed, {**rest, "sampling_params": parameters})
        return None


class BulkServing(ServingTokens):
    """vLLM's handler of the single route, in two halves: admit a request, and make an answer of its output."""

    engine_client: Any
    """An Admission, which passes on what it has not itself."""

    def __init__(self, single: ServingTokens) -> None:
        vars(self).update(vars(single))
        self.engine_client = Admission(single.engine_client)

    async def serve_tokens_full_generator(self, request: GenerateRequest, result_generator: Any, *rest: Any) -> Any:
        """Admit the request that `serve_tokens` has prepared."""
        outputs, sent = await result_generator
        return Admitted(request, outputs, rest, sent)

    async def admit(self, body: Any) -> Any:
        """Admit a request; return it, or the error that it is answered with. Raises what the single route does."""
        request = GenerateRequest.model_validate(body, from_attributes=True)
        if request.stream:
            raise ValueError("a bulk call has no streams: its lines come as their requests are finished")
        parameters = request.sampling_params
        parameters.flat_logprobs = parameters.prompt_logprobs is None  # lists, in place of two objects for each token
        return await self.serve_tokens(request)

    async def admit_like(self, admitted: Admitted, own: OwnPart) -> Admitted | None:
        """Admit a request that only its own part tells from an admitted one; None where each must go its own way."""
        template = admitted.sent
        if template is None or self.request_logger is not None:
            return None
        request, request_id = copy(template), ID_PREFIX + (random_uuid() if own.request_id is None else own.request_id)
        parameters: Any = copy(template.sampling_params)
        parameters.seed = own.seed
        request.sampling_params, request.request_id, request.arrival_time = parameters, request_id, time.time()
        outputs = await self.engine_client.send(request)
        return Admitted(admitted.request, outputs, (request_id, *admitted.rest[1:]))

    async def answer(self, admitted: Admitted, output: Any) -> Any:
        """Return the answer to a request, as the single route does; raises `output` where that is an error."""
        return await super().serve_tokens_full_generator(admitted.request, _one(output), *admitted.rest)

    def _create_tokens_logprobs(
        self,
        token_ids: Sequence[int],
        top_logprobs: Sequence[Mapping[int, Logprob] | None],
        num_output_top_logprobs: int | None = None,
    ) -> ChatCompletionLogProbs:
        """Return what vLLM's own returns, of plain values: it makes two models for each token, and checks them."""
        content: Any
        if isinstance(top_logprobs, FlatLogprobs) and num_output_top_logprobs in (0, 1):
            # The token that was sampled is the first of its position.
            values = [top_logprobs.logprobs[start] for start in top_logprobs.start_indices]
            entries = [_logprob(*each) for each in zip(token_ids, values, strict=False)]
            content = [{**each, "top_logprobs": [each]} for each in entries]
        else:
            pairs = zip(token_ids, top_logprobs, strict=False)
            content = [_logprob_entry(*each, num_output_top_logprobs) for each in pairs]
        return ChatCompletionLogProbs.model_construct(content=content)


class BulkCall:
    """One bulk call: admits its requests in their order, and makes lines of what is finished."""

    def __init__(self, raw_request: Request, bodies: Sequence[Any]) -> None:
        self._raw_request = raw_request
        self._bodies = bodies
        state = raw_request.app.state
        self._engine = state.engine_client
        self._serving = BulkServing(state.serving_tokens)
        self._with_policies = POLICIES_HEADER in raw_request.headers
        self._running: dict[int, Admitted] = {}
        self._alike: tuple[Any, Any] = (None, None)
        """The last request that went its own way, and what others must have in common with it."""
        self._finished: list[tuple[int, Any]] = []
        self._wake_up = asyncio.Event()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the lines, those that are finished together in one chunk; abort the rest where nobody reads on."""
        admitting = asyncio.create_task(self._admit())
        missing = len(self._bodies)
        try:
            while missing:
                await self._wake_up.wait()
                self._wake_up.clear()
                finished, self._finished = self._finished, []
                missing -= len(finished)
                yield b"".join([await self._line(*each) for each in finished])
        finally:
            admitting.cancel()
            if self._running:
                ids = [each.outputs.request_id for each in self._running.values()]
                # In a task of its own: nothing can be awaited here, as whoever hangs up cancels this one.
                aborting = asyncio.create_task(self._engine.abort(ids, internal=True))
                _aborting.add(aborting)
                aborting.add_done_callback(_aborting.discard)

    async def _admit(self) -> None:
        for index, body in enumerate(self._bodies):
            try:
                admitted = await self._admit_one(body)
            except Exception as error:
                admitted = error
            if not isinstance(admitted, Admitted):
                self._finish(index, admitted)
                continue
            self._running[index] = admitted
            # One output comes for each request, or an error: no task needs to wait for it.
            admitted.outputs.put = partial(self._finish, index, note=True)  # type: ignore[method-assign]
            if (output := admitted.outputs.output) is not None:  # it came while the request was being admitted
                self._finish(index, output)

    async def _admit_one(self, body: Any) -> Any:
        """Admit a request; what follows from what it has in common with the one before it is not worked out again."""
        own, (first, shared) = OwnPart.of(body), self._alike
        if own and own.rest == shared and (admitted := await self._serving.admit_like(first, own)):
            return admitted
        admitted = await self._serving.admit(body)
        self._alike = (admitted, own.rest) if own and isinstance(admitted, Admitted) else (None, None)
        return admitted

    def _finish(self, index: int, output: Any, note: bool = False) -> None:
        if note:
            note_policies(self._running[index].outputs, output)
        self._finished.append((index, output))
        self._wake_up.set()

    async def _line(self, index: int, output: Any) -> bytes:
        admitted = self._running.pop(index, None)
        try:
            answer = await self._serving.answer(admitted, output) if admitted else output
            if isinstance(answer, Exception):
                raise answer
        except Exception as error:
            refused = await _error_response(self._raw_request, error)
            return _encode(index, refused.status_code, msgspec.Raw(refused.body))
        if isinstance(answer, ErrorResponse):
            return _encode(index, answer.error.code, answer)
        if self._with_policies and admitted:
            answer = _with_policies(answer, admitted.outputs)
        return _encode(index, 200, answer)


def _with_policies(answer: Any, outputs: Any) -> dict[str, Any]:
    """Return an answer as a mapping that begins with the policies: who reads them need not read the rest."""
    runs: list[Run] = policies_of(outputs)
    return {"policies": runs, **vars(answer)}


def _encode(index: int, status: int, body: Any) -> bytes:
    return msgspec.json.encode([index, status, body], enc_hook=vars) + b"\n"


async def _one(output: Any) -> AsyncGenerator[Any, None]:
    if isinstance(output, Exception):
        raise output
    yield output


async def _error_response(raw_request: Request, error: Exception) -> Response:
    """Return what vLLM's server answers where the single route raises `error`."""
    handler: Any = vllm_error_handler if isinstance(error, VLLMError) else exception_handler
    if isinstance(error, ValidationError):
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        handler, error = validation_exception_handler, RequestValidationError(found)
    response: Response = await handler(raw_request, error)
    return response


def _logprob_entry(token: int, top: Mapping[int, Logprob] | None, most: int | None) -> dict[str, Any]:
    if top is None or token not in top:
        return {"token": f"token_id:{token}", "logprob": LOWEST_LOGPROB, "bytes": None, "top_logprobs": []}
    shown: Iterable[tuple[int, Logprob]] = top.items()
    if most != -1:
        shown = list(shown)[: 0 if most is None else max(most, 1)]
    return {
        **_logprob(token, top[token].logprob),
        "top_logprobs": [_logprob(other, each.logprob) for other, each in shown],
    }


def _logprob(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": max(logprob, LOWEST_LOGPROB), "bytes": None}
