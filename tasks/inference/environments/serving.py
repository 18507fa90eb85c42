"""Serves rollouts that nobody watches: each episode is sent once, when it has ended.

verifiers' own server sends every change of a trace as it happens, and looks at all that was sent before to find it. Our
sampler reads an episode when it is whole. Any other client is served as by verifiers' own server.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import verifiers.v1.serve.pool as verifiers_pool
import zmq
from pydantic import TypeAdapter
from verifiers.v1.configs.client import ClientConfig
from verifiers.v1.serve.delta import dump, pack, unpack
from verifiers.v1.serve.server import EnvServer
from verifiers.v1.types import SamplingConfig

from tasks.inference.environments.kept_turns import kept_rollout
from tasks.inference.sampling.frames import FrameSocket
from tasks.inference.sampling.rollout_client import EPISODE, KEPT_TURNS, TURN, UNWATCHED

_CLIENT_CONFIG: TypeAdapter[Any] = TypeAdapter(ClientConfig)
_log = logging.getLogger(__name__)


class RolloutServer(EnvServer):  # type: ignore[misc]
    """verifiers' server, which answers a request that is unwatched with one message."""

    frontend: Any
    """verifiers' own socket; in its place, while this serves, a Frontend."""
    _last_client: tuple[Any, Any] = None, None
    """The client of the last request as it came, and validated: nearly all requests have the same one."""

    async def run(self) -> None:
        """Serve until cancelled."""
        bound, tasks = self.frontend, set[asyncio.Task[None]]()

        def begin(frames: list[bytes]) -> None:
            client_id, request_id, method, payload = frames
            task = asyncio.create_task(self._handle(client_id, request_id, method, payload))
            if method == b"run":  # now, and not when the task begins: a cancellation may come before
                self._running[request_id.decode()] = task
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async with self.env.serving():
            self.frontend = Frontend(zmq.Socket.shadow(bound), begin)
            _log.info("EnvServer up: taskset=%s address=%s", self.taskset_id, self.address)
            try:
                await asyncio.Event().wait()
            except (asyncio.CancelledError, KeyboardInterrupt):
                pass
            finally:
                for task in tasks:
                    task.cancel()
                self.frontend.close()
                bound.close()
                self.ctx.term()
                _log.info("EnvServer down: taskset=%s", self.taskset_id)

    async def _handle(self, client_id: bytes, request_id: bytes, method: bytes, payload: bytes) -> None:
        request = unpack(payload) if method == b"run" else {}
        if UNWATCHED not in request:
            await super()._handle(client_id, request_id, method, payload)
            return

        def send_turn(turn: Mapping[str, str]) -> None:
            with suppress(zmq.ZMQError):  # whoever asked is gone
                self.frontend.send_now([client_id, request_id, TURN, pack(turn)])

        try:
            with kept_rollout(request.get(KEPT_TURNS), send_turn) as on_trace:
                episode = await self._run_unwatched(request, on_trace)
            reply = pack({"success": True, "error": None, EPISODE: episode})
        except asyncio.CancelledError:
            reply = _failure("Cancelled: rollout aborted")
        except (KeyboardInterrupt, SystemExit):  # the server ends
            raise
        except BaseException as error:  # an error of this rollout: the others go on
            _log.warning("request failed: %s", error, exc_info=True)
            reply = _failure(f"{type(error).__name__}: {error}")
        finally:
            self._running.pop(request_id.decode(), None)
        try:
            await self.frontend.send_multipart([client_id, request_id, b"reply", reply])
        except zmq.ZMQError as error:
            _log.warning("failed to send response: %s", error)

    async def _run_unwatched(self, request: dict[str, Any], on_trace: Callable[[Any], None] | None) -> dict[str, Any]:
        sampling = SamplingConfig.model_validate(request["sampling"])
        context = self._context(self._client(request["client"]), request["model"], sampling)
        (slot,) = self.env.slots(self._build_task(request["task_data"]))
        episode = await self.env.run_slot(slot, context, self._gate, on_trace=on_trace)
        # Not the episode as a whole: its sums over all traces are read by nobody.
        return {
            "id": episode.id,
            "ok": episode.ok,
            "errors": [dump(error) for error in episode.errors],
            "traces": [dump(trace) for trace in episode.traces],
        }

    def _client(self, data: Any) -> Any:
        known, client = self._last_client
        if data != known:
            client = _CLIENT_CONFIG.validate_python(data)
            self._last_client = data, client
        return client


class Frontend(FrameSocket):
    """A server's socket with the one coroutine that verifiers' handlers await."""

    async def send_multipart(self, frames: Sequence[bytes], copy: bool = True) -> None:
        """Send a message at once; `copy` is accepted and means nothing here. Once it is closed, nothing is sent."""
        self.send_now(frames)

    def send_now(self, frames: Sequence[bytes]) -> None:
        """Send a message; once it is closed, nothing is sent."""
        if not self._socket.closed:  # a rollout that is cancelled as the server ends still answers
            self.send(frames)


def install_rollout_server() -> None:
    """Let verifiers serve environments of this process with RolloutServer. Idempotent."""
    verifiers_pool.EnvServer = RolloutServer


def _failure(error: str) -> bytes:
    return bytes(pack({"success": False, "error": error}))
