"""PolicyTrackingLLM: vLLM's engine client, which records the policy that sampled each token of a request.

Where the worker captures experts, it also adds those of a request to its last output, as vLLM does on CUDA.

`host.py` makes the one of the API server's process; routes and middleware run in the same event loop. Tokens are
counted while the engine is paused, before other weights are loaded: all tokens up to there belong to the policy that is
served, and what follows to the policy that `/update_weight_version` names next. The counts are those of the output
processor, which is the same for all devices and model runners: a paused engine has sent every token that it sampled,
and samples no more. No clock is involved.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from tasks.inference.engine.client import POLICIES_HEADER

TokenSpan = tuple[str, int]
"""The key of a policy, and the number of tokens that it sampled."""
_answered: ContextVar[list[list[TokenSpan]] | None] = ContextVar("answered", default=None)
"""The spans of the requests that the current HTTP request has made; None where its client does not ask for them."""


class PolicyLog:
    """The policy that the engine serves, and the tokens of requests in flight that earlier policies sampled."""

    def __init__(self) -> None:
        self.current = ""
        self._earlier: dict[str, list[TokenSpan]] = {}
        """By request, the spans of policies before the current one."""

    def close(self, counts: Mapping[str, int]) -> None:
        """Count the tokens of the requests in flight, by request, as sampled with the current policy or before."""
        # `spans` has taken those of a request that is not in flight any more, or no caller will.
        self._earlier = {request: self.spans(request, count) for request, count in counts.items()}

    def spans(self, request_id: str, count: int) -> list[TokenSpan]:
        """Return the spans of a request that has `count` tokens now, and forget them."""
        spans: list[TokenSpan] = []
        for key, length in [*self._earlier.pop(request_id, ()), (self.current, count)]:
            # An aborted request is answered with fewer tokens than were sampled.
            if (length := min(length, count)) > 0:
                count -= length
                length += spans.pop()[1] if spans and spans[-1][0] == key else 0
                spans.append((key, length))
        return spans


class PolicyTrackingLLM(AsyncLLM):
    """vLLM's engine client with a PolicyLog."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.policies = PolicyLog()
        self.captures_experts = False
        """Whether workers were asked to capture experts."""

    async def update_weight_version(self, new_version: str) -> None:
        """Name the weights that the engine holds."""
        await super().update_weight_version(new_version)
        self.policies.current = new_version

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request; its spans go to the HTTP request that made it, with the last output."""
        answered = _answered.get() if sampling_params.output_kind == RequestOutputKind.FINAL_ONLY else None
        async for output in super().generate(prompt, sampling_params, request_id, **options):
            if self.captures_experts and output.finished and len(output.outputs) == 1:
                output.outputs[0].routed_experts = await self._take_experts(request_id, output, sampling_params)
            # Several choices of one request are requests of their own in the engine.
            if answered is not None and output.finished and len(output.outputs) == 1:
                answered.append(self.policies.spans(request_id, len(output.outputs[0].token_ids)))
            yield output

    async def _take_experts(self, request_id: str, output: RequestOutput, sampling: Any) -> npt.NDArray[Any]:
        end = len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids)
        arguments = request_id, sampling.routed_experts_prompt_start, end
        # All workers choose the same experts.
        dtype, shape, data = (await self.collective_rpc("take_experts", args=arguments))[0]
        return np.frombuffer(data, dtype).reshape(shape)

    async def count_tokens(self) -> dict[str, int]:
        """Count the tokens of all requests in flight as the served policy's; return them by request.

        The engine is paused.
        """
        await self._handle_sent_outputs()
        states = self.output_processor.request_states.values()
        # Several choices of one request share an id; no spans of theirs are asked for.
        counts = {state.external_req_id: state.detokenizer.num_output_tokens() for state in states if state.detokenizer}
        self.policies.close(counts)
        return counts

    async def _handle_sent_outputs(self) -> None:
        """Wait until all outputs that have left the engine's core are yielded; it is paused, and sends no more."""
        marker = QueueMarker()
        self.engine_core.outputs_queue.put_nowait(marker)
        await marker.reached.wait()
        await asyncio.sleep(0)  # a request whose output came just before is woken before this


class QueueMarker:
    """An empty entry of the queue of outputs; `reached` is set once all entries before it are handled."""

    outputs: tuple[Any, ...] = ()
    timestamp = 0.0
    engine_index = 0

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    @property
    def scheduler_stats(self) -> None:
        """Read by vLLM's handler after `outputs`."""
        self.reached.set()


class PolicyHeader:
    """ASGI middleware: answers to requests with POLICIES_HEADER name in it the spans of policies, as JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and add the header to its answer."""
        name = POLICIES_HEADER.lower().encode()
        if scope["type"] != "http" or name not in dict(scope["headers"]):
            return await self.app(scope, receive, send)
        answered = list[list[TokenSpan]]()
        _answered.set(answered)

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and answered:
                message["headers"] = [*message["headers"], (name, json.dumps(answered[0]).encode())]
            await send(message)

        await self.app(scope, receive, send_with_header)
