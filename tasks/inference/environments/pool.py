"""Serves an environment with several worker processes, and ends when one of them dies or hangs.

The pool does not replace a worker itself: the supervisor starts the whole server again, and samples again what was in
flight there.
"""

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from verifiers.v1.serve.pool import EnvServerPool

from tasks.inference.environments.servers import answers, hangs
from tasks.runtime.process_variables import bind_address

HEALTH_SECONDS = 5.0
"""Between two health requests to a worker."""
END_SECONDS = 1.0
"""Grace for the broker's own SIGTERM after a worker's end: both may have been sent one at the same time."""
WORKER_LOST = 4
"""Exit status of a server that lost a worker."""
LONGEST_DIRECTORY = 85
"""Characters of a directory for sockets: paths of Unix sockets have at most 107."""

logger = logging.getLogger(__name__)


class WatchedPool(EnvServerPool):  # type: ignore[misc]
    """verifiers' broker with two threads for each worker: one waits for its end, one sends health requests."""

    _ipc_dir: str
    """verifiers' directory for the sockets of the workers."""

    def __init__(self, hang_seconds: float, report: Callable[[str], None], key: str, *arguments: Any) -> None:
        # Before there are threads: all would import it for their first request, beside what starts a worker.
        from tasks.inference.environments import connections

        self.hang_seconds = hang_seconds
        self.report = report
        self.ending = threading.Event()
        self.lost = ""
        """The worker that was lost and how; empty while none was."""
        super().__init__(*arguments)
        # In the server's own temporary directory, which the supervisor removes also where this process is killed.
        if len(tempfile.gettempdir()) <= LONGEST_DIRECTORY:
            os.rmdir(self._ipc_dir)
            self._ipc_dir = tempfile.mkdtemp(prefix="pool-")
        # With the option set, an answer to a client that has gone (it gave up a health request) ends the whole broker.
        self.frontend.setsockopt(zmq.ROUTER_MANDATORY, 0)
        if key:
            connections.seal_frontend(self, key)

    async def run(self) -> None:
        """Serve until cancelled."""
        loop, running = asyncio.get_running_loop(), asyncio.current_task()
        loop.set_exception_handler(_pass_over_late_polls)

        def end() -> None:
            if running and not self.ending.is_set():
                self.ending.set()
                running.cancel()

        loop.add_signal_handler(signal.SIGTERM, end)
        await super().run()

    def _spawn_worker(self) -> None:
        super()._spawn_worker()
        index, process = self.workers[-1]["index"], self.workers[-1]["process"]
        logger.info("started worker %d, process %d", index, process.pid)
        for watch in (self._wait_for_end, self._check_health):
            threading.Thread(target=watch, args=(index, process), name=f"worker {index}", daemon=True).start()

    def _wait_for_end(self, index: int, process: Any) -> None:
        # Not by the process's sentinel: children of the worker may have inherited that, and may outlive it.
        with contextlib.suppress(ChildProcessError):  # another thread has already reaped it
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if self.ending.wait(END_SECONDS):
            return  # the whole server is ending, and the worker was only the first
        self.lost = f"worker {index}, process {process.pid}, ended with status {process.exitcode}"
        logger.error("%s: the server ends", self.lost)
        os.kill(os.getpid(), signal.SIGTERM)

    def _check_health(self, index: int, process: Any) -> None:
        """Report the server's address once the first worker answers; kill one that answered and no longer does."""
        address = f"ipc://{self._worker_path(index)}"
        # It may take as long as it likes to load the environment: only one that answered before can hang.
        while process.is_alive() and not (known := answers(address, self.hang_seconds)):
            if known is None:  # at once: it did not wait for an answer
                self.ending.wait(HEALTH_SECONDS)
        if process.is_alive():
            logger.info("worker %d is watched", index)
            if not index:
                self.report(self.address)
        while not self.ending.wait(HEALTH_SECONDS) and process.is_alive():
            if hangs(address, self.hang_seconds) and process.is_alive() and not self.ending.is_set():
                logger.error("worker %d does not answer for %g s: killed", index, self.hang_seconds)
                process.kill()

    def _shutdown(self) -> None:
        self.ending.set()
        self.frontend.close()  # refuse connections at once: clients must not wait for the workers' ends
        super()._shutdown()


def _pass_over_late_polls(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle errors of callbacks as asyncio does, but for a message that comes as the server's end cancels its poll.

    pyzmq then gives a result to the cancelled poll, which would be a traceback at the end of a healthy server's log.
    """
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


def serve_pool(
    environment: Mapping[str, Any],
    max_workers: int | None,
    config_data: Mapping[str, Any],
    report: Callable[[str], None],
    set_up_worker: Callable[[], None],
    key: str,
) -> int:
    """Serve with a broker and its workers until SIGTERM or the loss of a worker; return the exit status.

    `environment` is the section of the run's config and `config_data` verifiers' config of it; `max_workers` is None
    for a pool without a bound; `report` is called with
    the address once the first worker answers, `set_up_worker` in every worker. A `key` seals the server's connections.
    """
    settings = environment["pool"]
    pool = WatchedPool(
        environment["hang_seconds"],
        report,
        key,
        {"config_data": config_data},
        max_workers,
        "tcp://127.0.0.1:0" if key else f"tcp://{bind_address()}:0",
        set_up_worker,
        settings.get("multiplex", 128),
        settings["type"] == "elastic",
    )
    asyncio.run(pool.run())
    return WORKER_LOST if pool.lost else 0
