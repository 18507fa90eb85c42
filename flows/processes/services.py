"""The supervisor of what lives as long as a run: engine, environment servers, learner, Prefect server.

Services start side by side, each behind a guardian (`flows.processes.guardian`) and with a log file of its own; a dead
or hanging one is started again a bounded number of times; a log that grows too large is moved aside; all are gone with
their whole process trees when the block ends or the flow dies. A service that someone else runs is adopted by its URL
and never started, watched or ended.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from flows.processes.ownership import sweep
from flows.processes.service import Handle, ServiceFailed, ServiceSpec
from flows.processes.service_log import LogKeeper
from storage.policies.scratch import Scratches

__all__ = ["Handle", "ServiceFailed", "ServiceSpec", "Supervisor"]


class Supervisor:
    """Owns the services of one run: `with Supervisor(run_name, directory) as supervisor: ...`.

    When the block ends, in whatever way, no process of theirs is left, and no temporary file: an engine leaves sockets
    and more behind even when it is asked to end. On entry, processes and temporary files of flows that are gone are
    swept away. `directory` is for logs and reports.
    """

    def __init__(self, run_name: str, directory: Path) -> None:
        self.run_name = run_name
        self.directory = Path(directory)
        self._handles: list[Handle] = []
        # Short and not in `directory`: the name of a socket has at most 107 characters.
        self._scratches = Scratches(Path(tempfile.gettempdir()) / f"stagecoach-{os.getuid()}")
        self._temporary: Path | None = None
        self._logs: LogKeeper | None = None

    def __enter__(self) -> "Supervisor":
        self.directory.mkdir(parents=True, exist_ok=True)
        sweep()
        self._temporary = self._scratches.make("services")
        self._logs = LogKeeper(lambda: [(handle.spec.log, handle.spec.log_bytes) for handle in list(self._handles)])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self, spec: ServiceSpec) -> Handle:
        """Start a service, or adopt an external one; returns at once, see `Handle.wait`."""
        assert all(handle.spec.name != spec.name for handle in self._handles), f"two services named {spec.name!r}"
        if self._temporary is not None:
            spec = replace(spec, env={"TMPDIR": str(self._temporary), **spec.env})
        handle = Handle(spec)
        self._handles.append(handle)
        return handle

    def start_all(self, specs: Sequence[ServiceSpec]) -> list[Handle]:
        """Start services side by side, after every external one among them has answered; in the order of `specs`."""
        external = {spec.name: self.start(spec) for spec in specs if spec.external}
        for handle in external.values():
            handle.wait()
        return [external.get(spec.name) or self.start(spec) for spec in specs]

    def close(self) -> None:
        """End all services, the last started first, and wait until none of their processes is left."""
        handles = self._handles[::-1]
        for handle in handles:
            handle.ask_to_stop()
        for handle in handles:
            handle.stopped()
        if self._logs is not None:
            self._logs.close()
            self._logs = None
        self._handles = []
        if self._temporary is not None:
            self._scratches.discard(self._temporary)
            self._temporary = None
