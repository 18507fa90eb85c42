"""A pool of environment workers that kills hanging workers and ends when one is lost, so that it is started again."""

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
from tasks.inference.environments.termination import cancel_on_sigterm

HEALTH_SECONDS = 5.0
END_SECONDS = 1.0
"""How long a worker may be gone before its broker is told to end, when both are told at the same time."""
WORKER_LOST = 4
"""Exit status of a server that lost a worker."""
LONGEST_DIRECTORY = 85
"""Characters of a directory for sockets: the system takes names of 107 altogether."""

logger = logging.getLogger(__name__)


class WatchedPool(EnvServerPool):  # type: ignore[misc]
    """The broker of verifiers, with two threads for each worker: one waits for its end, one asks whether it answers."""

    _ipc_dir: str
    """Of verifiers: where the sockets of the workers are."""

    def __init__(self, hang_seconds: float, report: Callable[[str], None], *arguments: Any) -> None:
        self.hang_seconds = hang_seconds
        self.report = report
        self.unreported = threading.Lock()
        """Taken by whoever reports the address, and never given back."""
        self.ending = threading.Event()
        self.lost = ""
        """Which worker was lost and how; empty as long as none was."""
        super().__init__(*arguments)
        if len(tempfile.gettempdir()) <= LONGEST_DIRECTORY:  # ours, which is removed with us, however we end
            os.rmdir(self._ipc_dir)
            self._ipc_dir = tempfile.mkdtemp(prefix="pool-")
        # Else an answer to a client that has gone, after a health request that it gave up, ends the whole broker.
        self.frontend.setsockopt(zmq.ROUTER_MANDATORY, 0)

    def _spawn_worker(self) -> None:
        super()._spawn_worker()
        index, process = self.workers[-1]["index"], self.workers[-1]["process"]
        logger.info("started worker %d, process %d", index, process.pid)
        for watch in (self._wait_for_its_end, self._ask):
            threading.Thread(target=watch, args=(index, process), name=f"worker {index}", daemon=True).start()

    def _wait_for_its_end(self, index: int, process: Any) -> None:
        # Not by its sentinel: what a worker started may have inherited that, and lives on.
        with contextlib.suppress(ChildProcessError):  # another thread was told of the end before
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if self.ending.wait(END_SECONDS) or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            return  # told to end, and the worker was only the first to do so
        status = process.exitcode
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        self.lost = f"worker {index}, process {process.pid}, {how}"
        logger.error("%s: the server ends", self.lost)
        os.kill(os.getpid(), signal.SIGTERM)

    def _ask(self, index: int, process: Any) -> None:
        """Report the server once a worker answers; kill one that answered before and does not any more."""
        address = f"ipc://{self._worker_path(index)}"
        while process.is_alive() and not answers(address, self.hang_seconds):
            continue
        if process.is_alive() and self.unreported.acquire(blocking=False):
            self.report(self.address)
        while not self.ending.wait(HEALTH_SECONDS) and process.is_alive():
            if hangs(address, self.hang_seconds) and process.is_alive() and not self.ending.is_set():
                logger.error("worker %d does not answer for %g s: killed", index, self.hang_seconds)
                process.kill()

    def _shutdown(self) -> None:
        self.ending.set()
        self.frontend.close()  # from now on nobody can connect: clients are not to wait for the workers' ends
        super()._shutdown()


def serve_pool(
    environment: Mapping[str, Any],
    config_data: Mapping[str, Any],
    report: Callable[[str], None],
    set_up_worker: Callable[[], None],
) -> int:
    """Serve with a broker and its workers until told to end, or until a worker is lost; return the exit status.

    `environment` is our section of the config, `config_data` what verifiers makes of it, `report` takes the address
    once a worker answers, `set_up_worker` is called in every worker.
    """
    cancel_on_sigterm()
    own = environment["pool"]
    elastic = own["type"] == "elastic"
    pool = WatchedPool(
        environment["hang_seconds"],
        report,
        {"config_data": config_data},
        own["max_workers"] if elastic else own["num_workers"],
        "tcp://127.0.0.1:0",
        set_up_worker,
        own.get("multiplex", 128),
        elastic,
    )
    with contextlib.suppress(KeyboardInterrupt):  # told to end before the loop went, or while workers started
        asyncio.run(pool.run())
    if not pool.ending.is_set():  # the signal came while workers were being started, which verifiers leaves alone
        pool._shutdown()
    return WORKER_LOST if pool.lost else 0
