"""ChatTeacher: the client of a teacher's chat API, whose replies become tokens of the trained model.

`model_client.resolve_seeded_client` makes one for each endpoint, in the process of an environment; all is in the event
loop of that process, but for rendering. Requests are sent again by the OpenAI library. A reply that is empty, cut off,
or read as another one from its tokens is an error of its rollout: it is never trained on.
"""

import asyncio
import json
import time
from collections import defaultdict
from typing import Any

import httpx
from openai import OpenAIError
from verifiers.v1.clients.base import DEFAULT_LIMITS, build_async_openai
from verifiers.v1.clients.train import ElasticRendererPool, TrainClient, tool_to_wire
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.errors import model_error
from verifiers.v1.types import TurnTokens

from tasks.inference.environments.agent_runs import agent_run, request_digest
from tasks.inference.trace_rows.demonstrations import DemonstrationRenderer, DemonstrationUnusable

ROUTE = "/chat/completions"
STREAMING = ("stream", "stream_options")
COMPLETE = ("stop", "tool_calls")
_free_at: defaultdict[str, float] = defaultdict(float)
"""When this process may send the next request to an address, by the monotonic clock."""


class ChatTeacher(TrainClient):  # type: ignore[misc]
    """Calls a chat API, `retries` times again where that fails, with at least `seconds_between` two requests."""

    def __init__(self, config: Any, retries: int, seconds_between: float) -> None:
        super().__init__(config)
        self._seconds_between = seconds_between
        http = httpx.AsyncClient(
            timeout=httpx.Timeout(**config.timeout.model_dump()),
            limits=DEFAULT_LIMITS,
            event_hooks={"request": [self._wait]},
        )
        self.client = build_async_openai(config).with_options(http_client=http, max_retries=retries)
        self._renderers = ElasticRendererPool(config.renderer_model_name, config.renderer, multiplex=config.multiplex)

    async def _wait(self, _request: httpx.Request) -> None:
        now, address = time.monotonic(), self.config.base_url
        begin = max(now, _free_at[address])
        _free_at[address] = begin + self._seconds_between
        await asyncio.sleep(begin - now)

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        **others: Any,
    ) -> Any:
        """Return the reply to one call; raises ProviderError, of status 422 for one that cannot be trained on."""
        run = agent_run(session_id)
        assert run is not None, "each call is of an agent run"
        if not isinstance(dialect, ChatDialect):
            raise model_error("a teacher behind a chat API answers chat completions alone", status_code=400)
        # verifiers makes a stream of the whole reply.
        body = {name: value for name, value in body.items() if name not in STREAMING}
        digest = request_digest(body)
        kept = (run.kept_answers or {}).get(digest)
        try:
            raw = json.loads(kept) if kept else await self.client.post(ROUTE, body=body, cast_to=object)
            response = dialect.parse_response(dialect.validate_response(raw))
            response.raw = raw
            async with self._renderers.acquire() as slot:
                response.tokens = await slot.run(lambda: reply_tokens(slot.renderer, response, turn))
        except OpenAIError as error:
            raise model_error(error) from error
        except ValueError as error:
            raise model_error(f"the teacher's reply cannot be trained on: {error}", status_code=422) from error
        run.trace.info["teacher"] = response.model  # as the API names it, with its version
        if not kept:
            run.keep(digest, body["model"], json.dumps(raw))
        return response


def reply_tokens(renderer: Any, response: Any, turn: Any) -> TurnTokens:
    """Return the tokens of a reply and of its prompt, with log-probs of 0.0, as it has none.

    The prompt of a later turn extends the tokens before it where the renderer can do that, as for a policy. Raises
    ValueError for a reply that is empty, cut off or cannot be rendered.
    """
    message = response.message.model_copy(update={"provider_state": None})  # it would stand for the reasoning
    if response.finish_reason not in COMPLETE:
        raise DemonstrationUnusable(f"it is cut off ({response.finish_reason}); rollout.max_tokens is its limit")
    if not (message.content or "").strip() and not message.tool_calls:
        raise DemonstrationUnusable("it is empty")
    if any(part.type != "text" for each in turn.prompt if isinstance(each.content, list) for part in each.content):
        raise DemonstrationUnusable("its prompt has images")
    if any(tool.type != "function" or tool.namespace for tool in turn.tools):
        raise DemonstrationUnusable("its prompt has tools that are no plain functions, which no renderer writes")
    tools = [tool_to_wire(tool) for tool in turn.tools] or None
    messages = [message_to_wire(each) for each in turn.prompt]
    prompt, completion = DemonstrationRenderer(renderer).reply(messages, message_to_wire(message), tools)
    before, tail = turn.previous_renderer_token_ids(), messages[turn.tail_start :]
    extended = renderer.bridge_to_next_turn(*before, tail, tools=tools) if before else None
    spans = turn.prompt_message_spans(extended) if extended else prompt.message_token_spans()
    prompt = extended or prompt
    return TurnTokens(
        prompt_ids=prompt.token_ids,
        completion_ids=completion,
        completion_logprobs=[0.0] * len(completion),
        message_spans=spans,
        is_content=prompt.is_content,
        bridged=extended is not None,
    )
