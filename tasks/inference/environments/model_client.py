"""SeededClient: the model client of an environment's process, which gives every call of an agent run its own seed.

verifiers' interception servers make one for each endpoint (`patches.call_models_with`) and share it among the agent
runs (`agent_runs`) that call there. `EngineHttp` carries the calls of an engine: one that was answered before a crash
gets the kept answer.
"""

import base64
import io
import json
from typing import Any

import httpx
import numpy as np
from verifiers.v1.clients import Client, TrainClient, resolve_client
from verifiers.v1.clients.base import DEFAULT_LIMITS
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect, ResponsesDialect

from tasks.inference.engine.client import POLICIES_FIELD, POLICIES_HEADER, sampled_by
from tasks.inference.environments.agent_runs import CHAT_HEADER, ENGINE_SEED_BITS, agent_run, request_digest
from tasks.inference.environments.chat_teacher import ChatTeacher
from tasks.inference.environments.responses_api import response_body
from tasks.inference.trace_rows import rows
from tasks.inference.trace_rows.image_tensors import picture_problem

CHAT_API_SEED_BITS = 31
"""Chat APIs take 32 bits with a sign."""
GENERATE = "/inference/v1/generate"


def resolve_seeded_client(config: Any) -> "SeededClient":
    """Return the client for an endpoint: an engine's, tokens in and out, or a chat API's."""
    headers = dict(config.headers)
    if settings := headers.pop(CHAT_HEADER, ""):
        chat = ChatTeacher(config.model_copy(update={"headers": headers}), **json.loads(settings))
        return SeededClient(chat, CHAT_API_SEED_BITS)
    if not isinstance(config, TrainClientConfig):
        return SeededClient(resolve_client(config), CHAT_API_SEED_BITS)
    client = EngineClient(config)
    http = EngineHttp(timeout=httpx.Timeout(**config.timeout.model_dump()), limits=DEFAULT_LIMITS)
    client.client = client.client.with_options(http_client=http)
    return SeededClient(client, ENGINE_SEED_BITS)


class SeededClient(Client):  # type: ignore[misc]
    """Calls `client` with a seed of `bits` bits for each call of a run that has a seed."""

    def __init__(self, client: Client, bits: int) -> None:
        self._client, self._bits = client, bits

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        **others: Any,
    ) -> Any:
        """Return the reply to one call; raises what the client raises."""
        run = agent_run(session_id)
        if run is None or run.seeds is None:
            return await self._client.get_response(dialect, body, sampling, session_id, turn, **others)
        messages = dialect.parse_request(body).messages if turn is None else turn.prompt
        with run.seeds.call(messages, self._bits) as seed:
            body["seed"] = seed  # in place: the trace records the body as what was sent
            sampling = sampling.model_copy(update={"seed": seed})
            return await self._client.get_response(dialect, body, sampling, session_id, turn, **others)

    async def relay(self, dialect: Any, body: dict[str, Any], session_id: str | None = None, **others: Any) -> Any:
        """Return the streamed reply of a chat API to one call; raises what the client raises."""
        run = agent_run(session_id)
        if run is None or run.seeds is None:
            return await self._client.relay(dialect, body, session_id, **others)
        with run.seeds.call(dialect.parse_request(body).messages, self._bits) as seed:
            body["seed"] = seed
            return await self._client.relay(dialect, body, session_id, **others)

    async def relay_aux(self, *arguments: Any, **others: Any) -> Any:
        """Return the reply to a request that samples nothing."""
        return await self._client.relay_aux(*arguments, **others)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


class EngineClient(TrainClient):  # type: ignore[misc]
    """Samples replies from an engine by its tokens, for chat completions and for the Responses API."""

    async def get_response(self, dialect: Any, body: dict[str, Any], *arguments: Any, **others: Any) -> Any:
        """Return the reply to one call; raises what verifiers' client raises."""
        if not isinstance(dialect, ResponsesDialect):
            return await super().get_response(dialect, body, *arguments, **others)
        # The request's messages are read already, and its turn carries them: of the dialect nothing is left to do.
        response = await super().get_response(ChatDialect(), body, *arguments, **others)
        response.raw = response_body(response, body["model"])
        return response


class EngineHttp(httpx.AsyncClient):
    """Sends requests to an engine; those of kept rollouts that were answered before get that answer."""

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Return the answer to a request; status 400 for a picture that is elsewhere, too large or broken."""
        if not request.url.path.endswith(GENERATE):
            return await super().send(request, **options)
        body = json.loads(await request.aread())
        for part in body.get("content_parts") or ():
            if problem := picture_problem(str(part.get("url"))):
                return httpx.Response(400, text=problem, request=request)
        run = agent_run(request.headers.get(SESSION_ID_HEADER))
        if run is None:
            return await super().send(request, **options)
        digest = "" if run.kept_answers is None else request_digest(body)
        answer = (run.kept_answers or {}).get(digest)
        if answer is None:
            response = await super().send(_for_engine(request, body), **options)
            if response.status_code != 200:
                return response
            answer = _with_experts(response.text, body["sampling_params"].get("routed_experts_prompt_start", 0))
            if header := response.headers.get(POLICIES_HEADER):
                answer = f"{POLICIES_FIELD}{header},{answer[1:]}"
            run.keep(digest, body["model"], answer)
        if (spans := sampled_by(answer)) and run.seeds:
            run.trace.info.setdefault(rows.POLICIES_FIELD, {})[str(body["sampling_params"]["seed"])] = spans
        return httpx.Response(200, text=answer, request=request)


def _with_experts(answer: str, start: int) -> str:
    """Return an answer with the experts of its tokens, from the prompt's `start` on, as verifiers has them."""
    if '"routed_experts":"' not in answer:
        return answer
    content = json.loads(answer)
    (choice,) = content["choices"]
    experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    data = base64.b64encode(experts.tobytes()).decode()
    choice["routed_experts"] = {"data": data, "dtype": experts.dtype.name, "shape": experts.shape, "start": start}
    return json.dumps(content, separators=(",", ":"))


def _for_engine(request: httpx.Request, body: dict[str, Any]) -> httpx.Request:
    """Return a request for the log-prob of each sampled token alone, with the text that the engine looks for `stop` in.

    renderers asks for the likeliest token's as well and reads none of it: the engine sorts all logits for that.
    """
    sampling = body["sampling_params"]
    changes = {"logprobs": 0} if sampling.get("logprobs") == 1 else {}
    if sampling.get("stop"):  # a seat's own may stand beside the `detokenize` of all
        changes["detokenize"] = True
    if not changes:
        return request
    content = json.dumps({**body, "sampling_params": {**sampling, **changes}}).encode()
    headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
    return httpx.Request(request.method, request.url, headers=headers, content=content, extensions=request.extensions)
