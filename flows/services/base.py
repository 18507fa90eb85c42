"""Supervisor, RunService, PolicyLock: what all services of a run have in common.

Services start in parallel, each behind a guardian (`flows.services.guardian`) and with a log file of its own; a dead or
hanging one is restarted a bounded number of times; a log that grows too large is moved aside; all are gone with their
whole process trees when the block ends or the flow dies. An external service is adopted by its URL and never started,
watched or ended.
"""

import logging
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

from configs.algorithms import FrozenModelConfig
from configs.environments import EnvironmentConfig
from configs.run import RunConfig
from configs.services import EngineConfig, LearnerConfig
from flows.services.logs import LOG_BYTES, LOOK_SECONDS, Variables, keep_newest
from flows.services.ownership import sweep
from flows.services.pools import STAND_IN_NEEDS, stand_in
from flows.services.process import Handle, Report, ServiceFailed, ServiceSpec
from storage.policies.scratch import ScratchDirectories
from storage.roots import user_directory

EXTERNAL_SECONDS = 10.0
"""Longest wait for a service that someone else runs: it is there or it is not."""
Command = tuple[Sequence[str], Variables]
"""A command line, and its variables."""
_log = logging.getLogger(__name__)


class Supervisor:
    """Owns the processes of one run: `with Supervisor(run_name, directory) as supervisor: ...`.

    When the block ends, in whatever way, none of their processes is left, and no temporary file: an engine leaves
    sockets and more behind even when it ends by request. On entry, processes and temporary files of flows that are gone
    are swept away. `directory` is for logs, which processes on one run share, and for reports, which they do not.
    """

    def __init__(self, run_name: str, directory: Path, *, on_pool: bool = False) -> None:
        self.run_name = run_name
        self.on_pool = on_pool
        """Whether this is the machine of a pool from which a run requested its services."""
        self.directory = Path(directory)
        self._handles: list[Handle] = []
        self._open = ExitStack()
        """Ends the thread that keeps logs and removes the scratch directories."""
        self.closed = threading.Event()
        """Set when the services are being ended."""
        self._listeners: list[Callable[..., None]] = []

    def __enter__(self) -> "Supervisor":
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if path.is_symlink():  # logs are appended to and emptied, which would affect its target
                raise ServiceFailed(f"{path} is a symbolic link where a log is to be. Nothing was started: remove it")
        # Before anything starts: an engine of a killed flow may still hold the memory.
        sweep()
        private = temporary_directory()  # not in `directory`, which may have a long name
        self._temporary = self._scratch("services", private, private)
        keeper = threading.Thread(target=self._keep_logs, name="logs of services", daemon=True)
        keeper.start()
        self._open.callback(keeper.join)
        self._open.callback(self.closed.set)  # the last one first
        return self

    def start(self, spec: ServiceSpec) -> Handle:
        """Start a process, or adopt an external service; returns at once, see `Handle.wait`."""
        assert all(handle.spec.name != spec.name for handle in self._handles), f"two services named {spec.name!r}"
        spec = replace(spec, env={"TMPDIR": str(self._temporary), **spec.env})
        self._handles.append(Handle(spec, self.tell))
        return self._handles[-1]

    @cached_property
    def reports(self) -> Path:
        """The directory of what services report, of this supervisor alone: other processes may work on the same run."""
        return self._scratch("services", self.directory / "reports")

    def scratch_in(self, parent: Path) -> Path:
        """Return an empty directory below another, for as long as the services; a killed flow's is swept away."""
        private = user_directory(parent)
        return self._scratch("state", private, private)

    def _scratch(self, name: str, directory: Path, private: Path | None = None) -> Path:
        scratches = ScratchDirectories(directory, private=private)
        path = scratches.make(name)
        self._open.callback(scratches.discard, path)
        return path

    @contextmanager
    def subscribe(self, listener: Callable[..., None]) -> Iterator[None]:
        """Within the block, call `listener` with the events of services and their facts by keyword.

        `starting`: the run begins to wait for `service`. `lost`: `service` ended without being asked to, which `text`
        describes. `note`: a service keeps the run waiting, in `text`. Threads that watch services are the callers.
        """
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def _keep_logs(self) -> None:
        ended = False
        while not ended:
            ended = self.closed.wait(LOOK_SECONDS)  # then they are looked at once more
            for log in [handle.spec.log for handle in self._handles]:  # a list: services are started meanwhile
                try:
                    keep_newest(log, LOG_BYTES)
                except OSError:
                    _log.warning("cannot bound the log %s", log, exc_info=True)

    def tell(self, event: str, **facts: Any) -> None:
        """Call all listeners with an event, see `subscribe`."""
        for listener in list(self._listeners):
            listener(event, **facts)

    def close(self, *_: object) -> None:
        """End all services, the last started first, and wait until none of their processes is left."""
        # The last started first: it may be a client of those before. All are told before one is waited for, so that
        # their grace periods run in parallel.
        handles = self._handles[::-1]
        for handle in handles:
            handle.ask_to_stop()
        for handle in handles:
            handle.join()
        self._open.close()  # which looks at their logs once more
        self._handles = []

    __exit__ = close


SOCKET_CHARACTERS = 107
"""Longest path of a socket, which the kernel cuts there; engines make theirs where TMPDIR says."""
ROOM = len("/services-0123456789ab/") + len(str(UUID(int=0)))
"""What comes after the directory for services in the path of an engine's socket."""


def temporary_directory() -> Path:
    """Return where services of this user have their temporary files: in TMPDIR, or where that is too long in /tmp."""
    place = user_directory(tempfile.gettempdir())
    return place if len(os.fsencode(place)) + ROOM <= SOCKET_CHARACTERS else user_directory("/tmp")


class RunService(ABC):
    """One kind of service of a run: one process or several in parallel, started early and waited for late."""

    deployment: ClassVar[str] = ""
    """The deployment that serves it on a pool of Prefect's; empty where it runs on the run's own machine alone."""

    def __init__(self, supervisor: Supervisor, config: RunConfig) -> None:
        self.supervisor = supervisor
        self._config = config
        self._on_pools = config.placement.services == "pools" and not supervisor.on_pool
        """Whether processes that it starts are flow runs on Prefect's pools, with stand-ins here."""
        self._lock = threading.Lock()
        self._handles: dict[str, Handle] = {}

    @abstractmethod
    def begin(self) -> None:
        """Start the processes in parallel, or adopt external ones; returns at once."""

    def check_available(self) -> None:  # noqa: B027
        """Check, before a run begins, what is provided from outside: external services, packages, weights.

        Starts nothing. Raises what names the missing part. Without an own method nothing is provided from outside.
        """

    @property
    def handles(self) -> list[Handle]:
        """The processes that were started."""
        return [*self._handles.values()]

    def _process(self, name: str, describe: Callable[[], ServiceSpec]) -> Handle:
        """Return a process by its name, started at its first use; threads of the run may call this concurrently."""
        with self._lock:
            if name not in self._handles:
                self._handles[name] = self.supervisor.start(describe())
            return self._handles[name]

    def _describe(
        self,
        name: str,
        command: Callable[[Path], Command],
        ready: Callable[[Report], bool],
        limits: EngineConfig | LearnerConfig | FrozenModelConfig | EnvironmentConfig | None = None,
        request: tuple[str, str, str] | None = None,
        external: str = "",
        needs: Collection[str] = (),
        **others: Any,
    ) -> ServiceSpec:
        """Describe a process that is named by its kind and its number.

        `command` makes the command line and its variables for the report, unless the process is `external` or a pool's:
        then `request` has service, member and source for its stand-in. `others` are further fields of ServiceSpec.
        """
        report = self.supervisor.reports / f"{name.replace(' ', '-', 1)}.json"
        log = self.supervisor.directory / report.with_suffix(".log").name
        argv: Sequence[str] = ()
        env: Variables = {}
        if request and self._on_pools and not external:
            argv, needs = stand_in(self._config, *request, report), STAND_IN_NEEDS
        elif not external:
            argv, env = command(report)
        if limits:
            # A process that hangs is first to be noticed.
            startup = limits.startup_seconds
            startup = min(EXTERNAL_SECONDS, startup) if external else startup + limits.hang_seconds
            bounds = {"hang_seconds": limits.hang_seconds, "max_restarts": limits.max_restarts}
            others = {"startup_seconds": startup, **bounds, **others}
        return ServiceSpec(name, argv, env, report, log, ready, external=external, needs=needs, **others)


def ready_reports(handles: Sequence[Handle]) -> list[Report]:
    """Return the reports of those processes of one kind that answer; waits for the first one where none does.

    Raises ServiceFailed where none is left.
    """
    if ready := [report for handle in handles if (report := handle.ready_now())]:
        return ready
    # Each is waited for to its end: one that was never seen to be ready would not be restarted when it dies.
    pool = ThreadPoolExecutor(len(handles), thread_name_prefix="wait for service")
    waits = [pool.submit(handle.wait) for handle in handles]
    pool.shutdown(wait=False)
    for wait in as_completed(waits):
        if not isinstance(wait.exception(), ServiceFailed):
            return [wait.result()]
    return [waits[-1].result()]  # all have failed, so it raises


class PolicyLock:
    """Holders of one policy share the lock; a holder of another policy waits until the last of them is gone.

    Further holders of the held policy enter also while another policy is waited for: a policy is held only during its
    step or its evaluation, so every policy gets its turn. Then the policy that was waited for longest is next: an
    evaluation does not wait permanently behind sampling that goes from policy to policy.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._held = ""
        self._holders = 0
        self._waiting: list[str] = []
        """The policies that are waited for, in the order in which they were asked for."""

    @property
    def is_shared(self) -> bool:
        """Whether several hold the policy."""
        return self._holders > 1

    @contextmanager
    def hold(self, policy_key: str) -> Iterator[None]:
        """Hold a policy within the block; waits for those who hold another, for ever if need be.

        Who holds one policy and asks for another within would wait for itself.
        """
        with self._free:
            self._waiting.append(policy_key)
            try:
                # Those who share the policy must not wait behind one who wants another.
                self._free.wait_for(lambda: policy_key == (self._held if self._holders else self._waiting[0]))
                self._held = policy_key
                self._holders += 1
            finally:
                self._waiting.remove(policy_key)
                self._free.notify_all()  # the first of those who wait may be another one now
        try:
            yield
        finally:
            with self._free:
                self._holders -= 1
                self._free.notify_all()

    def exchange(self, policy_key: str) -> bool:
        """Let the only holder hold another policy; False where there are others, or some wait for yet another one."""
        with self._free:
            assert self._holders, "nobody holds a policy"
            if self._holders > 1 or any(each != policy_key for each in self._waiting):
                return False
            self._held = policy_key
            self._free.notify_all()
            return True
