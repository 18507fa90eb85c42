"""Whole episodes of an environment with the framework's own agents, in which a function stands in for the model."""

import asyncio
import json

import pyarrow as pa
from aiohttp import web
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import environment_class, load_taskset, resolve_env_config

from storage.schemas.stage_tables import EXAMPLES
from tasks.inference.environments.examples import example_rows, verifiers_config
from tests.fixtures.endpoints import endpoint

SEED = 41


def played(settings, seats, reply, tasks=lambda task: 1, limits=None, together=False):
    """Play each task of a taskset as often as `tasks` says; return the episodes, and all requests in their order.

    `reply` to a request is a text, a message with tool calls, or the status of a refusal. The model of a seat has the
    seat's name; `limits` are settings of every seat. The episodes are played one after the
    other, or all `together`.
    """
    agent = {"harness": {"id": "chat_loop"}, "runtime": {"type": "subprocess"}, **(limits or {})}
    config = resolve_env_config({"taskset": settings, **{name: agent | {"model": name} for name in seats}})
    env = environment_class(settings["id"])(config)
    plan = [task for task in env.taskset.load() for _ in range(tasks(task))]
    return asyncio.run(episodes(env, plan, reply, together))


def listed(environment):
    """The examples of an environment, read in this process: one of their own takes seconds to start."""
    settings = environment.model_dump(mode="json")
    found = list(example_rows(settings, iter(load_taskset(verifiers_config(settings).taskset))))
    return pa.Table.from_pylist(found, schema=EXAMPLES.arrow)


def response(said):
    """Return what an endpoint answers whose model says a text or a message, or that refuses with a status."""
    if isinstance(said, int):
        return web.json_response({"error": {"message": "as told"}}, status=said)
    message = {"role": "assistant", "content": said} if isinstance(said, str) else said
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    about = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
    return web.json_response({**about, "choices": [choice]})


def calling(tool, **arguments):
    """A message that calls a tool."""
    call = {"id": "call", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


async def episodes(env, tasks, reply, together=False):
    """Play tasks of an environment before an endpoint that answers by `reply`; return the episodes and all requests."""
    bodies = []

    async def answer(request):
        bodies.append(await request.json())
        return response(reply(bodies[-1]))

    async with endpoint(answer) as url, env.serving():
        client = EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_SUCH_KEY")
        context = ModelContext(model="policy", client=client, sampling=SamplingConfig(seed=SEED))
        if together:
            return await asyncio.gather(*(env.run_episode(task, context) for task in tasks)), bodies
        return [await env.run_episode(task, context) for task in tasks], bodies
