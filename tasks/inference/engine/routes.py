"""Routes of the engine's process next to vLLM's: the tokens of requests in flight, and the checksum of the weights.

`POST /inference/v1/count_tokens` counts the tokens of the requests in flight as sampled with the policy that is served
(`token_policies`). It answers `{"requests": {ID: COUNT}}`, and 409 where the engine is not paused.

`POST /inference/v1/weights_sum` answers `{"workers": [SUM, ...]}`, where SUM is what `read_back.ReadBack` returns
for the `directory` of the request.
"""

from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from vllm.entrypoints.scale_out.token_in_token_out import api_router


def add_routes() -> None:
    """Add the routes to those that vLLM's server attaches when it is built."""
    for handle in (count_tokens, weights_sum):
        api_router.router.add_api_route(f"/inference/v1/{handle.__name__}", handle, methods=["POST"])


async def count_tokens(raw_request: Request) -> JSONResponse:
    """Count the tokens of all requests in flight as those of the policy that is served."""
    engine = raw_request.app.state.engine_client
    if not await engine.is_paused():
        problem = {"error": "tokens are counted while the engine is paused"}
        return JSONResponse(problem, status_code=HTTPStatus.CONFLICT)
    return JSONResponse({"requests": await engine.count_tokens()})


async def weights_sum(raw_request: Request) -> dict[str, Any]:
    """Answer with the checksum of the weights that each worker holds."""
    directory = (await raw_request.json())["directory"]
    engine = raw_request.app.state.engine_client
    return {"workers": await engine.collective_rpc("weights_sum", args=(directory,))}
