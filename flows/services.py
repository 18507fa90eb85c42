"""The supervisor of what lives as long as a run: engine, environment servers, learner, Prefect server.

Services start side by side, each behind a guardian (`flows.guardian`) and with a log file of its own; a dead one is
started again a bounded number of times; all are gone with their whole process trees when the block ends or the flow
dies. A service that someone else runs is adopted by its URL and never started, watched or ended.
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from flows.ownership import sweep
from flows.service import Handle, ServiceFailed, ServiceSpec

__all__ = ["Handle", "ServiceFailed", "ServiceSpec", "Supervisor"]


class Supervisor:
    """Owns the services of one run: `with Supervisor(run_name, directory) as supervisor: ...`.

    When the block ends, in whatever way, no process of theirs is left. On entry, processes of flows that are gone are
    swept away. `directory` is for logs and reports.
    """

    def __init__(self, run_name: str, directory: Path) -> None:
        self.run_name = run_name
        self.directory = Path(directory)
        self._handles: list[Handle] = []

    def __enter__(self) -> "Supervisor":
        self.directory.mkdir(parents=True, exist_ok=True)
        sweep()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self, spec: ServiceSpec) -> Handle:
        """Start a service, or adopt an external one; returns at once, see `Handle.wait`."""
        assert all(handle.spec.name != spec.name for handle in self._handles), f"two services named {spec.name!r}"
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
        self._handles = []
