"""The sampler's side of an environment server: verifiers' protocol, with episodes left as the plain data they come as.

A request says that nobody watches the rollout (UNWATCHED). A server of ours then answers with the whole episode at once
(`tasks.inference.environments.serving`); any other ignores the word and streams each change of a trace.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from verifiers.v1.serve.delta import EpisodeAssembly, TraceSummary, pack, unpack

from tasks.inference.sampling.frames import FrameSocket
from tasks.inference.sampling.lost_servers import ServerGone
from tasks.inference.sampling.sealed import connect

UNWATCHED = "unwatched"
"""Key of a request that does without changes of traces while the rollout runs."""
EPISODE = "episode"
"""Key of a reply that holds the whole episode."""
KEPT_TURNS = "kept_turns"
"""Key of a request for a rollout whose turns are kept: the answers that are known already, by request."""
TURN = b"turn"
"""Kind of a message with a turn of such a rollout: request, model and answer."""


OnTurn = Callable[[Mapping[str, str]], None]
"""Takes a turn of a rollout that is under way."""


class RolloutClient:
    """Runs rollouts on one environment server, from the running event loop."""

    def __init__(self, address: str) -> None:
        # The context of the process, which nobody ends: one of its own that is collected as garbage, with a socket that
        # was not closed, would wait for that socket for ever.
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, 0)
        connect(socket, address)
        self._frames = FrameSocket(socket, self._take)
        self._pending: dict[bytes, tuple[asyncio.Future[bytes], EpisodeAssembly, OnTurn]] = {}
        self._is_abandoned = False

    async def run(self, request: Mapping[str, Any], on_turn: OnTurn = lambda turn: None) -> dict[str, Any]:
        """Run one rollout; return its episode with all its traces, as the server dumped them.

        `request` is the dumped RunRequest. With KEPT_TURNS in it, `on_turn` takes the further turns as they end. Where
        the caller is cancelled, the server is asked to stop the rollout.
        Raises RuntimeError with the server's error, its type in front, and where parts of the episode were lost;
        ServerGone once it is abandoned.
        """
        request_id, assembly = uuid.uuid4().hex, EpisodeAssembly()
        try:
            answer = await self._ask(request_id, b"run", {**request, UNWATCHED: True}, assembly, on_turn)
        except asyncio.CancelledError:
            self._send(uuid.uuid4().hex, b"cancel", {"request_id": request_id})
            raise
        if not answer["success"]:
            raise RuntimeError(answer["error"] or "env server request failed")
        if EPISODE in answer:
            return dict(answer[EPISODE])
        summaries = [TraceSummary.model_validate(each) for each in answer["traces"]]
        return dict(assembly.finish(answer["head"], summaries))

    async def answers(self, seconds: float) -> bool:
        """Tell whether the server answers a health request in time."""
        try:
            async with asyncio.timeout(seconds):
                return bool((await self._ask(uuid.uuid4().hex, b"health", {}, EpisodeAssembly()))["success"])
        except TimeoutError:
            return False

    async def _ask(
        self,
        request_id: str,
        method: bytes,
        content: Mapping[str, Any],
        assembly: EpisodeAssembly,
        on_turn: OnTurn = lambda turn: None,
    ) -> dict[str, Any]:
        if self._is_abandoned:
            raise ServerGone
        reply = asyncio.get_running_loop().create_future()
        self._pending[request_id.encode()] = reply, assembly, on_turn
        try:
            self._send(request_id, method, content)
            return dict(unpack(await reply))
        finally:
            del self._pending[request_id.encode()]

    def close(self) -> None:
        """Close the connection; rollouts that are under way get no reply."""
        self._frames.close()

    def abandon(self) -> None:
        """Close the connection to a server that is gone; rollouts that are under way there, or go there, raise that."""
        self._is_abandoned = True
        for reply, *_ in self._pending.values():
            if not reply.done():
                reply.set_exception(ServerGone())
        self.close()

    def _send(self, request_id: str, method: bytes, content: Mapping[str, Any]) -> None:
        if not self._is_abandoned:  # else a rollout is cancelled that was there
            self._frames.send([request_id.encode(), method, pack(content)])

    def _take(self, frames: list[bytes]) -> None:
        request_id, kind, data = frames
        if request_id not in self._pending:  # the reply to a cancellation, or to a rollout that was cancelled
            return
        reply, assembly, on_turn = self._pending[request_id]
        if kind == b"delta":
            assembly.apply(unpack(data))
        elif kind == TURN:
            on_turn(unpack(data))
        elif not reply.done():
            reply.set_result(data)
