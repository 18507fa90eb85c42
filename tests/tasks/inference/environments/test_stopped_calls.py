"""A rollout that is stopped takes its model call with it: the framework hangs up, and servers leave that to it.

Handlers that end with their callers (aiohttp's `handler_cancellation`) would be cancelled twice; the second time comes
while the connection to the engine is being closed, which then stays open.
"""

import asyncio

import pytest
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.utils.loaders import load_environment

from configs.environments import EnvironmentConfig
from tasks.inference.environments.examples import verifiers_config

pytestmark = pytest.mark.engine

REVERSE = EnvironmentConfig(name="reverse", taskset={"id": "reverse_text", "num_examples": 1})


def test_the_model_is_told_when_a_rollout_is_stopped() -> None:
    asyncio.run(asyncio.wait_for(_stopped(), 120))


async def _stopped() -> None:
    asked, hung_up = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            hung_up.set()
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = EvalClientConfig(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1", api_key_var="NO_SUCH_KEY")
    environment: vf.Env = load_environment(verifiers_config(REVERSE.model_dump(mode="json")))
    async with environment.serving():
        (slot,) = environment.slots(next(iter(environment.taskset)))
        running = asyncio.create_task(environment.run_slot(slot, ModelContext(client=client, model="m")))
        await asked.wait()
        running.cancel()
        await hung_up.wait()
    await asyncio.gather(running, return_exceptions=True)
    await runner.cleanup()
