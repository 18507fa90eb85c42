"""Hanging up: a model call ends with the rollout that asked for it."""

from typing import Any


def end_calls_with_rollouts() -> None:
    """Let a handler of the interception server end when its caller has gone, and the call to the engine with it.

    A rollout that is cancelled closes its connection to that server. aiohttp leaves handlers running then unless told
    otherwise: the engine would go on with every reply of a stopped rollout to its last token. verifiers records such a
    call as cancelled and leaves the turn out.
    """
    from aiohttp import web

    runner = web.AppRunner

    class EndsWithItsCaller(runner):  # type: ignore[misc, valid-type]
        def __init__(self, app: web.Application, **settings: Any) -> None:
            super().__init__(app, **{"handler_cancellation": True} | settings)

    setattr(web, "AppRunner", EndsWithItsCaller)  # noqa: B010 (a type checker takes it for a class of its own)
